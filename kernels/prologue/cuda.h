// CUDA, without any header: what is not the compiler's own stands here, and compiles in a tenth of the time.
typedef unsigned char uint8_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;

#define HELPER __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define DEVICE_IN(T) const T*
#define DEVICE_OUT(T) T*
#define LANE_ARRAY(T) T*
#define SHARED(type, name, count) __shared__ __align__(16) type name[count]
#define BARRIER() __syncthreads()
#define SCALAR(name) name
#define SIMD_SHUFFLE(x, lane) __shfl_sync(0xffffffffu, x, lane)
#define SIMD_SHUFFLE_XOR(x, mask) __shfl_xor_sync(0xffffffffu, x, mask)

// Multiplications and additions that no compiler may fuse or split: the same rounding in every build.
#define MUL(x, y) __fmul_rn(x, y)
#define FMA(x, y, z) __fmaf_rn(x, y, z)
#define INF __int_as_float(0x7f800000)
#define EXP(x) expf(x)
#define LOG(x) logf(x)
#define LOG1P(x) log1pf(x)
#define SQRT(x) __fsqrt_rn(x)
#define RSQRT(x) rsqrtf(x)
#define SIN(x) sinf(x)
#define COS(x) cosf(x)
#define FLOAT_OF_BITS(x) __uint_as_float(x)

struct bfloat16 { unsigned short bits; };
struct float16 { unsigned short bits; };

HELPER unsigned short bfloat16_bits(float x) {  // to nearest even; a NaN is 0x7fff
#if __CUDA_ARCH__ >= 800
  unsigned short bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
#else
  unsigned whole = __float_as_uint(x);
  return x != x ? 0x7fff : (unsigned short)((whole + 0x7fffu + ((whole >> 16) & 1u)) >> 16);
#endif
}
HELPER unsigned short float16_bits(float x) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
HELPER float float16_value(unsigned short bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}

HELPER float to_float(bfloat16 x) { return __uint_as_float((unsigned)x.bits << 16); }
HELPER float to_float(float16 x) { return float16_value(x.bits); }
template <typename T> HELPER float to_float(T x) { return float(x); }
template <typename T> HELPER T from_float(float x) { return T(x); }
template <> HELPER bfloat16 from_float<bfloat16>(float x) { return bfloat16{bfloat16_bits(x)}; }
template <> HELPER float16 from_float<float16>(float x) { return float16{float16_bits(x)}; }

template <typename T> HELPER float from_bits(unsigned bits);
template <> HELPER float from_bits<bfloat16>(unsigned bits) { return __uint_as_float(bits << 16); }
template <> HELPER float from_bits<float16>(unsigned bits) { return float16_value((unsigned short)bits); }
template <typename T> HELPER unsigned to_bits(float x);
template <> HELPER unsigned to_bits<bfloat16>(float x) { return bfloat16_bits(x); }
template <> HELPER unsigned to_bits<float16>(float x) { return float16_bits(x); }

struct Words { unsigned w[4]; };
template <typename T> HELPER Words load16(const T* p) {
  uint4 v = *reinterpret_cast<const uint4*>(p);
  return Words{{v.x, v.y, v.z, v.w}};
}
template <typename T> HELPER Words load16_once(const T* p) {  // evicted first: each byte of a weight is read once
  uint4 v = __ldcs(reinterpret_cast<const uint4*>(p));
  return Words{{v.x, v.y, v.z, v.w}};
}
template <typename T> HELPER Words load8_once(const T* p) {
  uint2 v = __ldcs(reinterpret_cast<const uint2*>(p));
  return Words{{v.x, v.y, 0, 0}};
}

#if __CUDA_ARCH__ >= 800  // the instruction for these types and this shape; older cards take the shuffles below
#define MMA_INSTRUCTION(type, name)                                                                              \
  template <> HELPER void mma_16x8x16<type>(float* acc, const unsigned* a, const unsigned* b, int) {              \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." name "." name ".f32 "                                  \
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                               \
                 : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])                                        \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                            \
  }
template <typename T> HELPER void mma_16x8x16(float* acc, const unsigned* a, const unsigned* b, int lane);
MMA_INSTRUCTION(bfloat16, "bf16")
MMA_INSTRUCTION(float16, "f16")
#define MMA_16x8x16(T, acc, a, b) mma_16x8x16<T>(acc, a, b, LANE)
#endif
