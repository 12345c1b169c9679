// Metal: MLX has included metal_stdlib and defined bfloat16_t before this text.
#pragma METAL fp contract(off)

#define HELPER inline
#define UNROLL _Pragma("clang loop unroll(full)")
#define DEVICE_IN(T) const device T*
#define DEVICE_OUT(T) device T*
#define LANE_ARRAY(T) thread T*
#define SHARED(type, name, count) alignas(16) threadgroup type name[count]
#define BARRIER() threadgroup_barrier(metal::mem_flags::mem_threadgroup)
#define SCALAR(name) name
#define SIMD_SHUFFLE(x, lane) metal::simd_shuffle(x, ushort(lane))
#define SIMD_SHUFFLE_XOR(x, mask) metal::simd_shuffle_xor(x, ushort(mask))

// Multiplications and additions that no compiler may fuse or split: the same rounding in every build.
#define MUL(x, y) (float(x) * float(y))
#define FMA(x, y, z) metal::fma(float(x), float(y), float(z))
#define INF INFINITY
#define EXP(x) metal::precise::exp(float(x))
#define LOG(x) metal::precise::log(float(x))
#define LOG1P(x) precise_log1p(x)
#define SQRT(x) metal::precise::sqrt(float(x))
#define RSQRT(x) metal::precise::rsqrt(float(x))
#define SIN(x) metal::precise::sin(float(x))
#define COS(x) metal::precise::cos(float(x))
#define FLOAT_OF_BITS(x) as_type<float>(uint(x))

// Metal has no log1p. Kahan's form: the rounding error of 1 + x cancels in the quotient.
HELPER float precise_log1p(float x) {
  float sum = 1.0f + x;
  return sum == 1.0f ? x : (sum == INFINITY ? sum : x * (metal::precise::log(sum) / (sum - 1.0f)));
}

template <typename T> HELPER float to_float(T x) { return float(x); }
template <typename T> HELPER T from_float(float x) { return T(x); }

template <typename T> HELPER float from_bits(uint bits) { return float(as_type<T>(ushort(bits))); }
template <typename T> HELPER uint to_bits(float x) { return uint(as_type<ushort>(T(x))); }

struct Words { uint w[4]; };
HELPER Words words_of(uint4 v) {
  Words out;
  out.w[0] = v.x, out.w[1] = v.y, out.w[2] = v.z, out.w[3] = v.w;
  return out;
}
template <typename T> HELPER Words load16(const device T* p) { return words_of(*(const device uint4*)p); }
template <typename T> HELPER Words load16(const threadgroup T* p) { return words_of(*(const threadgroup uint4*)p); }
template <typename T> HELPER Words load16_once(const device T* p) { return load16(p); }
template <typename T> HELPER Words load8_once(const device T* p) {
  const uint2 v = *(const device uint2*)p;
  return words_of(uint4(v.x, v.y, 0, 0));
}
