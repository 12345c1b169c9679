/* CBLAS under its plain names for MLX: forwarded to the prefixed ones of PyPI's scipy-openblas32, but for float32
   products of few rows with a transposed matrix, which is what decoding is made of.

   OpenBLAS packs the matrix before it multiplies, so that a product of few rows moves it more than once. Here four
   columns are read once for all rows, and the next four are fetched meanwhile: four rows take as long as one
   (measured, two cores of a Xeon; without the fetching half as long again). Sums run over LANES partial sums,
   whatever the number of rows, so a row's result does not depend, in any bit, on how many rows are multiplied with
   it.

   Compiled without FEW_ROWS it only forwards. */

#include <stddef.h>

#define FORWARD(name, type, scalar)                                                                                   \
  void scipy_cblas_##type##gemm(int, int, int, int, int, int, scalar, const void *, int, const void *, int, scalar,   \
                                void *, int);                                                                         \
  void name(int order, int ta, int tb, int m, int n, int k, scalar alpha, const void *a, int lda, const void *b,      \
            int ldb, scalar beta, void *c, int ldc) {                                                                 \
    if (SERVES(type)) return;                                                                                         \
    scipy_cblas_##type##gemm(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);                            \
  }
#define SERVES(type) SERVES_##type
#define SERVES_d 0
#define SERVES_c 0

#ifndef FEW_ROWS
#define SERVES_s 0
#else

#if defined(__AVX512F__)
#define LANES 16
#define ROWS 4
#elif defined(__AVX__)
#define LANES 8
#define ROWS 2
#else
#define LANES 4
#define ROWS 4
#endif
#define MOST_ROWS 16 /* above it OpenBLAS is as fast (measured: 576 to 49,152 columns, two cores of a Xeon) */
#define ALONE 65536  /* products for which waking other threads costs more than it saves (assumed) */
#define EACH(i, count) _Pragma("GCC unroll 4") for (int i = 0; i < count; i++)
#define MIX __builtin_shufflevector

typedef float four __attribute__((vector_size(16), aligned(4), may_alias));
typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* The partial sums of LANES as four. */
static inline four fold(lanes sum) {
#if LANES == 16
  float __attribute__((vector_size(32))) half =
      MIX(sum, sum, 0, 1, 2, 3, 4, 5, 6, 7) + MIX(sum, sum, 8, 9, 10, 11, 12, 13, 14, 15);
  return MIX(half, half, 0, 1, 2, 3) + MIX(half, half, 4, 5, 6, 7);
#elif LANES == 8
  return MIX(sum, sum, 0, 1, 2, 3) + MIX(sum, sum, 4, 5, 6, 7);
#else
  return sum;
#endif
}

/* The sums over each of a, b, c and d. */
static inline four totals(four a, four b, four c, four d) {
  four ab = MIX(a, b, 0, 4, 1, 5) + MIX(a, b, 2, 6, 3, 7);
  four cd = MIX(c, d, 0, 4, 1, 5) + MIX(c, d, 2, 6, 3, 7);
  return MIX(ab, cd, 0, 1, 4, 5) + MIX(ab, cd, 2, 3, 6, 7);
}

/* y [R,4] = x [R,k] · w [4,k] transposed; `ahead`: fetch the four columns after these meanwhile. */
#define TILE(R)                                                                                                       \
  static void tile_##R(ptrdiff_t k, const float *x, ptrdiff_t ldx, const float *w, ptrdiff_t ldw, float *y,           \
                       ptrdiff_t ldy, int ahead) {                                                                    \
    lanes sum[R][4] = {0};                                                                                            \
    four out[R];                                                                                                      \
    ptrdiff_t i = 0;                                                                                                  \
    for (; i + LANES <= k; i += LANES) {                                                                              \
      lanes columns[4];                                                                                               \
      EACH(c, 4) columns[c] = *(const lanes *)(w + c * ldw + i);                                                      \
      if (ahead) EACH(c, 4) __builtin_prefetch(w + (4 + c) * ldw + i);                                                \
      EACH(r, R) {                                                                                                    \
        lanes row = *(const lanes *)(x + r * ldx + i);                                                                \
        EACH(c, 4) sum[r][c] += row * columns[c];                                                                     \
      }                                                                                                               \
    }                                                                                                                 \
    EACH(r, R) out[r] = totals(fold(sum[r][0]), fold(sum[r][1]), fold(sum[r][2]), fold(sum[r][3]));                   \
    for (; i < k; i++)                                                                                                \
      EACH(r, R) EACH(c, 4) out[r][c] += x[r * ldx + i] * w[c * ldw + i];                                             \
    EACH(r, R) *(four *)(y + r * ldy) = out[r];                                                                       \
  }
TILE(1)
TILE(2)
#if ROWS == 4
TILE(3)
TILE(4)
#endif

typedef void tiler(ptrdiff_t, const float *, ptrdiff_t, const float *, ptrdiff_t, float *, ptrdiff_t, int);
static tiler *const tiles[] = {
    tile_1, tile_2,
#if ROWS == 4
    tile_3, tile_4,
#endif
};

/* Four columns of y [m,·], from column c on. */
static void strip(ptrdiff_t c, ptrdiff_t m, ptrdiff_t k, const float *x, ptrdiff_t ldx, const float *w, ptrdiff_t ldw,
                  float *y, ptrdiff_t ldy) {
  for (ptrdiff_t r = 0; r < m; r += ROWS)
    tiles[(m - r < ROWS ? m - r : ROWS) - 1](k, x + r * ldx, ldx, w + c * ldw, ldw, y + r * ldy + c, ldy, r == 0);
}

int scipy_openblas_get_num_threads(void);

/* Whether the product was made here. CBLAS's numbers: 101 row-major, 111 as it lies, 112 transposed. */
static int few_rows(int order, int ta, int tb, int m, int n, int k, float alpha, const float *x, int ldx,
                    const float *w, int ldw, float beta, float *y, int ldy) {
  if (order != 101 || ta != 111 || tb != 112 || alpha != 1 || beta != 0 || m < 1 || m > MOST_ROWS || n < 4) return 0;
  int threads = (double)m * n * k < ALONE ? 1 : scipy_openblas_get_num_threads();
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int block = 0; block < n / 4; block++) strip(4 * (ptrdiff_t)block, m, k, x, ldx, w, ldw, y, ldy);
  if (n % 4) strip(n - 4, m, k, x, ldx, w, ldw, y, ldy); /* some columns twice, to the same result */
  return 1;
}
#define SERVES_s few_rows(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc)
#endif

FORWARD(cblas_sgemm, s, float)
FORWARD(cblas_dgemm, d, double)
FORWARD(cblas_cgemm, c, const void *)
