// CUDA: MLX has included cuda_bf16.h and cuda_fp16.h before this text, and calls its own float infinity `inf`.
#define HELPER __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define DEVICE_IN(T) const T*
#define DEVICE_OUT(T) T*
#define LANE_ARRAY(T) T*
#define SHARED(type, name, count) __shared__ __align__(16) type name[count]
#define BARRIER() __syncthreads()
#define SCALAR(name) name[0]
#define SIMD_SHUFFLE(x, lane) __shfl_sync(0xffffffffu, x, lane)
#define SIMD_SHUFFLE_XOR(x, mask) __shfl_xor_sync(0xffffffffu, x, mask)

// Multiplications and additions that no compiler may fuse or split: the same rounding in every build.
#define MUL(x, y) __fmul_rn(x, y)
#define FMA(x, y, z) __fmaf_rn(x, y, z)
#define INF __int_as_float(0x7f800000)
#define EXP(x) expf(x)
#define LOG1P(x) log1pf(x)
#define SQRT(x) __fsqrt_rn(x)
#define RSQRT(x) rsqrtf(x)
#define SIN(x) sinf(x)
#define COS(x) cosf(x)
#define FLOAT_OF_BITS(x) __uint_as_float(x)

HELPER float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
HELPER float to_float(__half x) { return __half2float(x); }
template <typename T> HELPER float to_float(T x) { return float(x); }
template <typename T> HELPER T from_float(float x) { return T(x); }
template <> HELPER __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }
template <> HELPER __half from_float<__half>(float x) { return __float2half_rn(x); }

template <typename T> HELPER float from_bits(unsigned bits);
template <> HELPER float from_bits<__nv_bfloat16>(unsigned bits) { return __uint_as_float(bits << 16); }
template <> HELPER float from_bits<__half>(unsigned bits) {
  return __half2float(__ushort_as_half((unsigned short)bits));
}
template <typename T> HELPER unsigned to_bits(float x);
template <> HELPER unsigned to_bits<__nv_bfloat16>(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }
template <> HELPER unsigned to_bits<__half>(float x) { return __half_as_ushort(__float2half_rn(x)); }

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
MMA_INSTRUCTION(__nv_bfloat16, "bf16")
MMA_INSTRUCTION(__half, "f16")
#define MMA_16x8x16(T, acc, a, b) mma_16x8x16<T>(acc, a, b, LANE)
#endif
