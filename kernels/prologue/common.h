// The same text in every build, on top of the build's own words.
#define F32(x) to_float(x)
#define CAST(T, x) from_float<T>(x)
#define LOAD16(p) load16(p)
#define LOAD16_ONCE(p) load16_once(p)
#define LOAD8_ONCE(p) load8_once(p)
#define PAIR_LO(T, word) from_bits<T>((word) & 0xffffu)
#define PAIR_HI(T, word) from_bits<T>((word) >> 16)
#define PACK(T, lo, hi) (to_bits<T>(lo) | to_bits<T>(hi) << 16)
#define SIMD_SUM(x) butterfly_sum(x)
#define SIMD_MAX(x) butterfly_max(x)

HELPER float butterfly_sum(float x) {
  UNROLL
  for (int mask = 16; mask > 0; mask >>= 1) x += SIMD_SHUFFLE_XOR(x, mask);
  return x;
}

HELPER float butterfly_max(float x) {
  UNROLL
  for (int mask = 16; mask > 0; mask >>= 1) {
    float other = SIMD_SHUFFLE_XOR(x, mask);
    x = other > x ? other : x;
  }
  return x;
}

// N elements side by side, loaded and stored at once, where they lie on a multiple of their own bytes (at most 16).
template <typename T, int N> struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack { T x[N]; };

template <typename T, int N> HELPER Pack<T, N> load(DEVICE_IN(T) from) {
  using Whole = Pack<T, N>;
  return *(DEVICE_IN(Whole))from;
}
template <typename T, int N> HELPER void store(DEVICE_OUT(T) to, Pack<T, N> pack) {
  using Whole = Pack<T, N>;
  *(DEVICE_OUT(Whole))to = pack;
}
template <typename T, int N> HELPER void widen(Pack<T, N> pack, LANE_ARRAY(float) out) {
  UNROLL
  for (int c = 0; c < N; ++c) out[c] = F32(pack.x[c]);
}

#ifndef MMA_16x8x16
// PTX's mma.sync.m16n8k16 by shuffles. With g = lane / 4 and j = lane % 4 a lane holds, two elements a word:
//   A [16,16]: a[0] (g, 2j), a[1] (g+8, 2j), a[2] (g, 2j+8), a[3] (g+8, 2j+8) and their right neighbours;
//   B [16,8]:  b[0] (2j, g), b[1] (2j+8, g) and the elements below them;
//   C [16,8]:  acc[0] (g, 2j), acc[1] (g, 2j+1), acc[2] (g+8, 2j), acc[3] (g+8, 2j+1).
template <typename T> HELPER float pair_dot(unsigned a, unsigned b, float sum) {
  return FMA(PAIR_HI(T, a), PAIR_HI(T, b), FMA(PAIR_LO(T, a), PAIR_LO(T, b), sum));
}
template <typename T>
HELPER void mma_16x8x16(LANE_ARRAY(float) acc, LANE_ARRAY(const unsigned) a, LANE_ARRAY(const unsigned) b, int lane) {
  for (int part = 0; part < 2; ++part) {
    for (int j = 0; j < 4; ++j) {
      int row = (lane & 28) + j, column = (lane & 3) * 8 + j;
      unsigned upper = SIMD_SHUFFLE(a[2 * part], row), lower = SIMD_SHUFFLE(a[2 * part + 1], row);
      unsigned left = SIMD_SHUFFLE(b[part], column), right = SIMD_SHUFFLE(b[part], column + 4);
      acc[0] = pair_dot<T>(upper, left, acc[0]);
      acc[1] = pair_dot<T>(upper, right, acc[1]);
      acc[2] = pair_dot<T>(lower, left, acc[2]);
      acc[3] = pair_dot<T>(lower, right, acc[3]);
    }
  }
}
#define MMA_16x8x16(T, acc, a, b) mma_16x8x16<T>(acc, a, b, LANE)
#endif
