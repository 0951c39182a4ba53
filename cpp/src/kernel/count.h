/* Float32 values counted into the bins of a histogram: one file of plain C for C++ and Python.
 *
 * The bins are defined by calibrators/histogram.py; the counts are equal to its own. Nothing is
 * allocated and nothing is global: the caller owns all memory, and two threads may count at once if
 * each has its own scratch. */
#ifndef CALIB8_KERNEL_COUNT_H
#define CALIB8_KERNEL_COUNT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CALIB8_KERNEL_FORM 4 /* raised when a function or a struct of this file changes */

#define CALIB8_BINS 4096                   /* a side */
#define CALIB8_CELLS (2 * CALIB8_BINS + 1) /* counts of a histogram; CALIB8_BINS is bin 0 */
#define CALIB8_SMALLEST_RANGE 0x1p-100     /* below this BINS / R would overflow float32 */
#define CALIB8_SCRATCH 66048               /* bytes of a scratch */

/* The state of a histogram without its counts. */
struct calib8_histogram_state {
  double base;       /* the first R, by TensorRT's rule; 0: a power of two */
  double full_range; /* R; 0 while only zeros were seen */
  double minimum;    /* of the finite values; inf while empty */
  double maximum;    /* -inf while empty */
  double latest;     /* largest finite |x| of the last call */
  int64_t total;     /* finite values */
  int64_t infinite;  /* values that are in no bin */
};

/* CALIB8_KERNEL_FORM of the compiled file. */
int calib8_kernel_form(void);

/* The number of implementations that this CPU can run. All give equal counts; the last is the fastest. */
int calib8_kernel_ways(void);

/* "plain", "neon", "avx2" or "avx512"; NULL for an index out of range. */
const char* calib8_kernel_way(int method);

/* Adds `count` values to a histogram. `method`: 0 to calib8_kernel_ways() - 1. `counts`: CALIB8_CELLS
 * entries. `scratch`: CALIB8_SCRATCH bytes, aligned to 8, zero before and after the call.
 * Returns 0; or the number of NaN in the first chunk with one, with the chunks before it added; or -1,
 * with nothing done, if `method` or `full_range` is out of range. */
int64_t calib8_observe(int method, struct calib8_histogram_state* state, int64_t* counts,
                       const float* values, size_t count, void* scratch);

/* The same for `number` histograms, one after the other: adds the values at values[k] to state[k] and
 * counts[k]. Stops at the first result other than 0 and returns it. `done` is the number of histograms
 * before that, or `number`. */
int64_t calib8_observe_each(int method, size_t number, struct calib8_histogram_state* const* state,
                            int64_t* const* counts, const float* const* values, const size_t* sizes,
                            void* scratch, size_t* done);

/* Doubles the range: merges the bins pairwise, outwards from bin 0. */
void calib8_halve(int64_t* counts);

/* Moves the counts of |x| == R into the last bin inside the range. */
void calib8_close(int64_t* counts);

/* Smallest power of two >= amax. */
double calib8_range_for(double amax);

#ifdef __cplusplus
}
#endif

#endif
