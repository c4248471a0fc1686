/* Products with packed 4-bit weights on processors with AVX-512.
 *
 * A register holds the table of 16 values, times the scale of a block, so that one permute
 * decodes 16 weights; it looks at the lowest four bits of each lane alone. Columns are decoded
 * 32 at a time, the even ones before the odd ones, and that is how activations come.
 *
 * weight: [rows, half] bytes of two codes, the first in the upper bits. scales: [rows, half / run],
 * one for each run of bytes, a multiple of 16. values: [16]. All else is float32.
 */

#include <immintrin.h>
#include <stdint.h>

enum { LANES = 16, ROWS = 4, TOKENS = 4 };

#define UNROLL _Pragma("GCC unroll 4")

static inline void decode(const uint8_t *octets, __m512 table, __m512 *first, __m512 *second) {
    __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)octets));
    *first = _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4), table);
    *second = _mm512_permutexvar_ps(codes, table);
}

/* `rows` by `tokens` of the output. Both are constants where this is inlined, as registers need. */
static inline __attribute__((always_inline)) void
tile(int rows, int tokens, const uint8_t *weight, const float *scales, __m512 table,
     const float *x, float *out, int64_t half, int64_t run, int64_t out_rows) {
    __m512 total[ROWS][TOKENS], tables[ROWS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int t = 0; t < tokens; t++) total[r][t] = _mm512_setzero_ps();
    int64_t blocks = half / run;
    for (int64_t block = 0; block < blocks; block++) {
        UNROLL for (int r = 0; r < rows; r++)
            tables[r] = _mm512_mul_ps(table, _mm512_set1_ps(scales[r * blocks + block]));
        for (int64_t k = block * run; k < (block + 1) * run; k += LANES) {
            UNROLL for (int r = 0; r < rows; r++) {
                __m512 first, second;
                decode(weight + r * half + k, tables[r], &first, &second);
                UNROLL for (int t = 0; t < tokens; t++) {
                    const float *at = x + 2 * (t * half + k);
                    total[r][t] = _mm512_fmadd_ps(first, _mm512_loadu_ps(at), total[r][t]);
                    total[r][t] = _mm512_fmadd_ps(second, _mm512_loadu_ps(at + LANES), total[r][t]);
                }
            }
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int t = 0; t < tokens; t++)
            out[t * out_rows + r] = _mm512_reduce_add_ps(total[r][t]);
}

/* out [tokens, rows] = x [tokens, 2 half] times the transposed weight. */
void product(const uint8_t *weight, const float *scales, const float *values, const float *x,
             float *out, int64_t rows, int64_t half, int64_t run, int64_t tokens) {
    __m512 table = _mm512_loadu_ps(values);
#pragma omp parallel for schedule(static)
    for (int64_t group = 0; group < (rows + ROWS - 1) / ROWS; group++) {
        int64_t row = group * ROWS;
        for (int64_t token = 0; token < tokens; token += TOKENS) {
            const uint8_t *w = weight + row * half;
            const float *s = scales + row * (half / run), *from = x + 2 * token * half;
            float *to = out + token * rows + row;
            int64_t left = tokens - token;
#define TILE(r, t) tile(r, t, w, s, table, from, to, half, run, rows)
            if (rows - row >= ROWS) {
                if (left >= 4) TILE(ROWS, 4);
                else if (left == 3) TILE(ROWS, 3);
                else if (left == 2) TILE(ROWS, 2);
                else TILE(ROWS, 1);
                continue;
            }
            for (int64_t last = row; last < rows; last++, w += half, s += half / run, to++) {
                if (left >= 4) TILE(1, 4);
                else if (left == 3) TILE(1, 3);
                else if (left == 2) TILE(1, 2);
                else TILE(1, 1);
            }
        }
    }
}

/* out [rows, 2 half], in the order of the activations. */
void unpack(const uint8_t *weight, const float *scales, const float *values, float *out,
            int64_t rows, int64_t half, int64_t run) {
    __m512 table = _mm512_loadu_ps(values);
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t k = 0; k < half; k += LANES) {
            __m512 scale = _mm512_set1_ps(scales[row * (half / run) + k / run]), first, second;
            decode(weight + row * half + k, _mm512_mul_ps(table, scale), &first, &second);
            _mm512_storeu_ps(out + 2 * (row * half + k), first);
            _mm512_storeu_ps(out + 2 * (row * half + k) + LANES, second);
        }
    }
}
