/* Float32 values counted into the bins of a histogram: one file of plain C for C++ and Python.
 *
 * What is counted, and how, is defined by calibrators/histogram.py; the same numbers to the last one.
 * Nothing is allocated and nothing is global: the caller owns all memory, and two threads may count
 * at once with a scratch of their own each. */
#ifndef CALIB8_KERNEL_COUNT_H
#define CALIB8_KERNEL_COUNT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CALIB8_KERNEL_FORM 3 /* raised when a function or a struct of this file changes */

#define CALIB8_BINS 4096                   /* a side */
#define CALIB8_CELLS (2 * CALIB8_BINS + 1) /* counts of a histogram; CALIB8_BINS is bin 0 */
#define CALIB8_SMALLEST_RANGE 0x1p-100     /* below this BINS / R would overflow float32 */
#define CALIB8_SCRATCH 66048               /* bytes of a scratch */

/* A histogram but for its counts. */
struct calib8_seen {
  double base;       /* where R starts, by TensorRT's rule; 0: a power of two */
  double full_range; /* R; 0 while only zeros were seen */
  double minimum;    /* of the finite values; inf while empty */
  double maximum;    /* -inf while empty */
  double latest;     /* largest finite |x| of the values that were added last */
  int64_t total;     /* finite values */
  int64_t infinite;  /* values that are in no bin */
};

/* CALIB8_KERNEL_FORM of the compiled file. */
int calib8_kernel_form(void);

/* How many ways of counting this CPU knows; all give the same, the last one soonest. */
int calib8_kernel_ways(void);

/* "plain", "neon", "avx2" or "avx512"; NULL where there is no such way. */
const char* calib8_kernel_way(int way);

/* Adds `count` values. `way`: 0 to calib8_kernel_ways() - 1. `counts`: CALIB8_CELLS of them.
 * `scratch`: CALIB8_SCRATCH bytes, aligned to 8, zero before and after.
 * Gives 0; or how many NaN were met: then `seen` has what came before them alone; or -1, with nothing
 * done, where there is no such way or `full_range` is none that a histogram can have. */
int64_t calib8_observe(int way, struct calib8_seen* seen, int64_t* counts, const float* values,
                       size_t count, void* scratch);

/* The same for `number` histograms, one after the other: the values at values[k] are added to what
 * seen[k] and counts[k] hold. Gives what the first gave that did not give 0, and goes no further;
 * `done` is how many came before it, or `number`. */
int64_t calib8_observe_each(int way, size_t number, struct calib8_seen* const* seen,
                            int64_t* const* counts, const float* const* values, const size_t* sizes,
                            void* scratch, size_t* done);

/* Counts of the doubled range: bins merged pairwise, outwards from bin 0. */
void calib8_halve(int64_t* counts);

/* |x| == R counted in the last bin inside the range. */
void calib8_close(int64_t* counts);

/* Smallest power of two >= amax. */
double calib8_range_for(double amax);

#ifdef __cplusplus
}
#endif

#endif
