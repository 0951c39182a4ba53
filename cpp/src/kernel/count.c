/* A chunk of values, in blocks that stay in the core's first cache:
 *
 *   values --> least, greatest, index trunc(x * BINS / R) --> indices other than 0 --> raise
 *                    |
 *                    '- beyond R, NaN, Inf: the range of the chunk is found, then it is counted again
 *
 *   table 0   table 1   ...             counters of 16 bits, raised in turns, so that equal
 *      |         |       |              indices do not wait for each other
 *      '---------+------ +              folded between least and greatest after each chunk
 *                        |
 *                     counts            and what was not raised is bin 0
 *
 * Neighbouring values are often equal. So a block is split into eight parts whose indices are raised
 * in turns ("spread"); two tables are then enough. Four tables, raised in order, serve data with many
 * zeros, which are equal in every part, and full chunks, whose counts two tables cannot hold.
 *
 * No value is lost: a chunk raises no counter of a table above 16 bits. */
#include "count.h"

#include <float.h>
#include <math.h>
#include <string.h>

#if defined(__FAST_MATH__) || FLT_EVAL_METHOD != 0
#error "the bins are those of float32 arithmetic as IEEE 754 has it"
#endif

#if defined(__GNUC__)
#define INLINE static inline __attribute__((always_inline))
#define PREFETCH(address) __builtin_prefetch(address, 0, 1)
#define PREFETCH_TO_WRITE(address) __builtin_prefetch(address, 1, 1)
#else
#define INLINE static inline
#define PREFETCH(address) (void)(address)
#define PREFETCH_TO_WRITE(address) (void)(address)
#endif

#if defined(__GNUC__) && defined(__x86_64__)
#define X86 1
#include <immintrin.h>
#define FOR(cpu) __attribute__((target(cpu)))
#else
#define X86 0
#endif

enum {
  CHUNK = 1 << 17, /* values whose range is found before they are counted; as in Python */
  BLOCK = 1 << 12,
  MAX_DIRECT_VALUES = 1 << 11, /* so few are counted without tables, whose folding costs more */
  VECTOR_SLACK =
      16, /* unused entries after the indices of a block: a vector is always stored in full */
  TABLES = 4,
  SPREAD_TABLES = 2,
  MAX_SPREAD_VALUES = CHUNK - 128, /* values that these hold, even if every block has a remainder */
  COUNTS_PER_LINE = 8,             /* in a cache line */
  FLOATS_PER_LINE = 16,            /* in a cache line */
  UNROLL = 16,                     /* indices raised in one step */
  SPREAD_PARTS = 8,                /* parts of a block */
  STRIDE =
      8256 /* counters from table to table: equal bins of two tables lie in different cache lines */
};

_Static_assert(TABLES* STRIDE * sizeof(uint16_t) == CALIB8_SCRATCH, "the tables fill the scratch");
_Static_assert(STRIDE >= CALIB8_CELLS, "a table holds every bin");
_Static_assert(CHUNK / TABLES <= UINT16_MAX, "a chunk overflows no counter");
_Static_assert(MAX_SPREAD_VALUES / SPREAD_TABLES + CHUNK / BLOCK <= UINT16_MAX,
               "nor does a smaller one of two");

/* The range of the values of a block or a chunk. */
struct extremes {
  float low, high; /* of all values; undefined if there is a NaN */
  int nan;         /* whether there is a NaN */
};

/* One implementation of the counting. */
struct method {
  const char* name;
  int indexes_zeros; /* whether `index` also returns indices that are 0 */
  /* Extremes of up to BLOCK values. */
  struct extremes (*find_extremes)(const float* x, size_t n);
  /* The same, and writes the indices to `out`, those that are 0 only with `indexes_zeros`. Returns the
   * number of indices. They are undefined if some |x| * scale exceeds BINS. */
  size_t (*index)(const float* x, size_t n, float scale, int32_t* out, struct extremes* extremes);
  /* Adds the bins `from` to `to` of all tables, or of the spread ones, to `counts`; clears them. */
  void (*fold)(uint16_t* tables, int is_spread, int64_t* counts, size_t from, size_t to);
};

/* ---- in plain C, which compilers make vectors of -------------------------------------------- */

/* Whole numbers in the order of the floats: -NaN < -inf < ... < -0 < 0 < ... < inf < NaN. */
INLINE int32_t key_of(float x) {
  int32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits ^ ((bits >> 31) & INT32_MAX);
}

INLINE float float_of_key(int32_t key) {
  const int32_t bits = key ^ ((key >> 31) & INT32_MAX);
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

INLINE struct extremes extremes_of_keys(int32_t low, int32_t high) {
  const int nan = low < key_of(-INFINITY) || high > key_of(INFINITY);
  return (struct extremes){float_of_key(low), float_of_key(high), nan};
}

INLINE struct extremes find_extremes(const float* x, size_t n) {
  int32_t low = INT32_MAX, high = INT32_MIN;
  for (size_t k = 0; k < n; ++k) {
    const int32_t key = key_of(x[k]);
    low = key < low ? key : low;
    high = key > high ? key : high;
  }
  return extremes_of_keys(low, high);
}

INLINE size_t index_all(const float* x, size_t n, float scale, int32_t* out,
                        struct extremes* extremes) {
  const float end = CALIB8_BINS; /* no larger number is cast */
  int32_t low = INT32_MAX, high = INT32_MIN;
  for (size_t k = 0; k < n; ++k) {
    const int32_t key = key_of(x[k]);
    low = key < low ? key : low;
    high = key > high ? key : high;
    float position = x[k] * scale;
    position = position < end ? position : end; /* NaN is not less */
    position = position > -end ? position : -end;
    out[k] = (int32_t)position;
  }
  *extremes = extremes_of_keys(low, high);
  return n;
}

INLINE void clear(uint16_t* tables, size_t number, size_t from, size_t to) {
  for (size_t t = 0; t < number; ++t) {
    memset(tables + t * STRIDE + from, 0, (to - from + 1) * sizeof *tables);
  }
}

INLINE void fold_of(uint16_t* tables, size_t number, int64_t* counts, size_t from, size_t to) {
  for (size_t k = from; k <= to; ++k) {
    uint32_t sum = 0;
    for (size_t t = 0; t < number; ++t) sum += tables[t * STRIDE + k];
    counts[k] += sum;
  }
  clear(tables, number, from, to);
}

INLINE void fold_all(uint16_t* tables, int is_spread, int64_t* counts, size_t from, size_t to) {
  if (is_spread)
    fold_of(tables, SPREAD_TABLES, counts, from, to);
  else
    fold_of(tables, TABLES, counts, from, to);
}

static struct extremes find_extremes_plain(const float* x, size_t n) { return find_extremes(x, n); }

static size_t index_plain(const float* x, size_t n, float scale, int32_t* out,
                          struct extremes* extremes) {
  return index_all(x, n, scale, out, extremes);
}

static void fold_plain(uint16_t* tables, int is_spread, int64_t* counts, size_t from, size_t to) {
  fold_all(tables, is_spread, counts, from, to);
}

#if X86

FOR("avx2") static struct extremes find_extremes_avx2(const float* x, size_t n) {
  return find_extremes(x, n);
}

FOR("avx2")
static size_t index_avx2(const float* x, size_t n, float scale, int32_t* out,
                         struct extremes* extremes) {
  return index_all(x, n, scale, out, extremes);
}

FOR("avx2")
static void fold_avx2(uint16_t* tables, int is_spread, int64_t* counts, size_t from, size_t to) {
  fold_all(tables, is_spread, counts, from, to);
}

/* ---- AVX-512, which can leave out the zeros ------------------------------------------------- */

struct vector_extremes {
  __m512 low, high;
  __mmask16 nan;
};

/* Handles up to 16 values, those of the mask. Returns where the next index goes. */
FOR("avx512f,avx512bw,popcnt")
INLINE int32_t* step(const float* x, __mmask16 mask, __m512 scales, int32_t* out,
                     struct vector_extremes* vectors) {
  const __m512 v = _mm512_maskz_loadu_ps(mask, x);
  vectors->low = _mm512_mask_min_ps(vectors->low, mask, v, vectors->low); /* NaN gives the second */
  vectors->high = _mm512_mask_max_ps(vectors->high, mask, v, vectors->high);
  vectors->nan |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  const __m512i bins = _mm512_cvttps_epi32(_mm512_mul_ps(v, scales));
  const __mmask16 nonzero = _mm512_test_epi32_mask(bins, bins);
  _mm512_storeu_si512(out, _mm512_maskz_compress_epi32(nonzero, bins));
  return out + _mm_popcnt_u32(nonzero);
}

FOR("avx512f,avx512bw,popcnt")
static size_t index_avx512(const float* x, size_t n, float scale, int32_t* out,
                           struct extremes* extremes) {
  const __m512 scales = _mm512_set1_ps(scale);
  struct vector_extremes vectors = {_mm512_set1_ps(INFINITY), _mm512_set1_ps(-INFINITY), 0};
  int32_t* next_index = out;
  size_t k = 0;
  for (; k + 16 <= n; k += 16) next_index = step(x + k, 0xFFFF, scales, next_index, &vectors);
  next_index = step(x + k, (__mmask16)((1U << (n - k)) - 1U), scales, next_index, &vectors);
  *extremes = (struct extremes){_mm512_reduce_min_ps(vectors.low),
                                _mm512_reduce_max_ps(vectors.high), vectors.nan != 0};
  return (size_t)(next_index - out);
}

FOR("avx512f,avx512bw")
static struct extremes find_extremes_avx512(const float* x, size_t n) {
  return find_extremes(x, n);
}

FOR("avx512f,avx512bw")
static void fold_avx512(uint16_t* tables, int is_spread, int64_t* counts, size_t from, size_t to) {
  fold_all(tables, is_spread, counts, from, to);
}

#endif

#if defined(__aarch64__)
#define PLAIN "neon" /* every aarch64 has it, and compilers use it */
#else
#define PLAIN "plain"
#endif

static const struct method METHODS[] = {
    {PLAIN, 1, find_extremes_plain, index_plain, fold_plain},
#if X86
    {"avx2", 1, find_extremes_avx2, index_avx2, fold_avx2},
    {"avx512", 0, find_extremes_avx512, index_avx512, fold_avx512},
#endif
};

int calib8_kernel_form(void) { return CALIB8_KERNEL_FORM; }

int calib8_kernel_ways(void) {
#if X86
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2")) return 1;
  const int has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                         __builtin_cpu_supports("popcnt");
  return has_avx512 ? 3 : 2;
#else
  return 1;
#endif
}

const char* calib8_kernel_way(int method) {
  return method >= 0 && method < (int)(sizeof METHODS / sizeof *METHODS) ? METHODS[method].name
                                                                         : NULL;
}

/* ---- the range ------------------------------------------------------------------------------ */

double calib8_range_for(double amax) {
  int exponent = 0;
  const double bounded = amax > CALIB8_SMALLEST_RANGE ? amax : CALIB8_SMALLEST_RANGE;
  const double mantissa = frexp(bounded, &exponent);
  return ldexp(1.0, mantissa == 0.5 ? exponent - 1 : exponent);
}

void calib8_halve(int64_t* counts) {
  int64_t* centre = counts + CALIB8_BINS; /* index k goes to trunc(k / 2) */
  centre[0] += centre[1] + centre[-1];
  for (ptrdiff_t k = 1; k < CALIB8_BINS / 2; ++k) {
    centre[k] = centre[2 * k] + centre[2 * k + 1];
    centre[-k] = centre[-2 * k] + centre[-2 * k - 1];
  }
  centre[CALIB8_BINS / 2] = centre[CALIB8_BINS];
  centre[-CALIB8_BINS / 2] = centre[-CALIB8_BINS];
  const size_t cleared_bytes = CALIB8_BINS / 2 * sizeof *counts;
  memset(centre + CALIB8_BINS / 2 + 1, 0, cleared_bytes);
  memset(counts, 0, cleared_bytes);
}

void calib8_close(int64_t* counts) {
  counts[1] += counts[0];
  counts[CALIB8_CELLS - 2] += counts[CALIB8_CELLS - 1];
  counts[0] = counts[CALIB8_CELLS - 1] = 0;
}

static void widen(struct calib8_histogram_state* state, int64_t* counts, double amax) {
  if (amax <= state->full_range) return;
  double target = calib8_range_for(amax);
  if (state->base > 0) {
    target = state->full_range > 0 ? state->full_range : state->base;
    while (target < amax) target *= 2;
  }
  if (state->full_range <= 0) state->full_range = target;
  for (; state->full_range < target; state->full_range *= 2) calib8_halve(counts);
}

/* ---- a chunk -------------------------------------------------------------------------------- */

static double amax_of(const struct extremes* extremes) {
  const double low = fabs((double)extremes->low), high = fabs((double)extremes->high);
  return low > high ? low : high;
}

static int is_within(const struct extremes* extremes, double range) {
  return !extremes->nan && amax_of(extremes) <= range;
}

static void merge_extremes(struct extremes* total, const struct extremes* block) {
  total->low = block->low < total->low ? block->low : total->low;
  total->high = block->high > total->high ? block->high : total->high;
  total->nan |= block->nan;
}

static size_t smaller_size(size_t a, size_t b) { return a < b ? a : b; }

static const struct extremes NO_VALUES = {INFINITY, -INFINITY, 0};

static struct extremes find_chunk_extremes(const struct method* method, const float* x, size_t n) {
  struct extremes total = NO_VALUES;
  for (size_t offset = 0; offset < n; offset += BLOCK) {
    const struct extremes block =
        method->find_extremes(x + offset, smaller_size(n - offset, BLOCK));
    merge_extremes(&total, &block);
  }
  return total;
}

static float scale_of(double full_range) { return (float)(CALIB8_BINS / full_range); }

static size_t cell_of(float x, float scale) {
  return (size_t)((ptrdiff_t)(x * scale) + CALIB8_BINS); /* the cast truncates */
}

/* Raises the counters of the indices. Meanwhile prefetches the values at `next`, two cache lines for
 * sixteen indices, since zeros may have no index. */
static void raise_in_order(uint16_t* tables, const int32_t* index, size_t n, const float* next) {
  uint16_t* zero = tables + CALIB8_BINS;
  size_t k = 0;
  for (; k + UNROLL <= n; k += UNROLL) {
    PREFETCH(next + 2 * k);
    PREFETCH(next + 2 * k + FLOATS_PER_LINE);
    for (size_t t = 0; t < UNROLL; ++t) {
      uint16_t* counter = zero + t % TABLES * STRIDE + index[k + t];
      *counter = (uint16_t)(*counter + 1);
    }
  }
  for (; k < n; ++k) {
    uint16_t* counter = zero + k % TABLES * STRIDE + index[k];
    *counter = (uint16_t)(*counter + 1);
  }
}

/* The same, with the indices of eight parts of the block in turns. */
static void raise_spread(uint16_t* tables, const int32_t* index, size_t n, const float* next) {
  uint16_t* zero = tables + CALIB8_BINS;
  const size_t part_size = n / SPREAD_PARTS;
  for (size_t k = 0; k < part_size; ++k) {
    PREFETCH(next + FLOATS_PER_LINE * k);
    for (size_t t = 0; t < SPREAD_PARTS; ++t) {
      uint16_t* counter = zero + t % SPREAD_TABLES * STRIDE + index[t * part_size + k];
      *counter = (uint16_t)(*counter + 1);
    }
  }
  for (size_t k = SPREAD_PARTS * part_size; k < n; ++k) {
    uint16_t* counter = zero + k % SPREAD_TABLES * STRIDE + index[k];
    *counter = (uint16_t)(*counter + 1);
  }
}

/* Counts values in tables that are folded at the end. Returns whether all values lie in the range; if
 * one does not, nothing is counted. */
static int count_by_tables(const struct method* method, int is_spread, double full_range,
                           int64_t* counts, const float* x, size_t n, uint16_t* tables,
                           struct extremes* extremes) {
  const float scale = scale_of(full_range);
  int32_t index[BLOCK + VECTOR_SLACK];
  size_t raised = 0;
  int is_inside = 1;
  *extremes = NO_VALUES;
  for (size_t offset = 0; offset < n && is_inside; offset += BLOCK) {
    struct extremes block;
    const size_t index_count =
        method->index(x + offset, smaller_size(n - offset, BLOCK), scale, index, &block);
    is_inside = is_within(&block, full_range);
    if (is_inside) {
      (is_spread ? raise_spread : raise_in_order)(tables, index, index_count,
                                                  x + smaller_size(offset + BLOCK, n));
      raised += index_count;
      merge_extremes(extremes, &block);
    }
  }
  if (raised > 0) {
    const size_t from = cell_of(extremes->low, scale), to = cell_of(extremes->high, scale);
    if (is_inside)
      method->fold(tables, is_spread, counts, from, to);
    else
      clear(tables, TABLES, from, to);
  }
  if (is_inside) counts[CALIB8_BINS] += (int64_t)(n - raised);
  return is_inside;
}

/* The same, without tables, for at most MAX_DIRECT_VALUES values. */
static int count_directly(const struct method* method, double full_range, int64_t* counts,
                          const float* x, size_t n, struct extremes* extremes) {
  int32_t index[MAX_DIRECT_VALUES + VECTOR_SLACK];
  const size_t index_count = method->index(x, n, scale_of(full_range), index, extremes);
  if (!is_within(extremes, full_range)) return 0;
  for (size_t k = 0; k < index_count; ++k) counts[CALIB8_BINS + index[k]] += 1;
  counts[CALIB8_BINS] += (int64_t)(n - index_count);
  return 1;
}

static int count_in_range(const struct method* method, const struct calib8_histogram_state* state,
                          int64_t* counts, const float* x, size_t n, uint16_t* tables,
                          struct extremes* extremes) {
  const double range = state->full_range;
  const int has_many_zeros =
      method->indexes_zeros && state->minimum >= 0; /* likely the output of a Relu */
  const int is_spread = n <= MAX_SPREAD_VALUES && !has_many_zeros;
  if (n <= MAX_DIRECT_VALUES) return count_directly(method, range, counts, x, n, extremes);
  return count_by_tables(method, is_spread, range, counts, x, n, tables, extremes);
}

/* Counts the finite values of a chunk that has infinite ones. */
static void count_finite(double full_range, int64_t* counts, const float* x, size_t n) {
  const float scale = scale_of(full_range);
  for (size_t k = 0; k < n; ++k) {
    if (!isinf(x[k])) counts[cell_of(x[k], scale)] += 1;
  }
}

/* Adds the number of NaN and infinite values to `nan` and `infinite`. Returns the extremes of the
 * finite values. */
static struct extremes count_nonfinite(const float* x, size_t n, int64_t* nan, int64_t* infinite) {
  struct extremes finite = NO_VALUES;
  for (size_t k = 0; k < n; ++k) {
    if (isnan(x[k])) {
      *nan += 1;
    } else if (isinf(x[k])) {
      *infinite += 1;
    } else {
      const struct extremes value = {x[k], x[k], 0};
      merge_extremes(&finite, &value);
    }
  }
  return finite;
}

static void update_state(struct calib8_histogram_state* state, const struct extremes* extremes,
                         int64_t finite) {
  /* + 0 turns -0 into 0 */
  const double low = (double)extremes->low + 0.0, high = (double)extremes->high + 0.0;
  const double amax = amax_of(extremes);
  state->minimum = low < state->minimum ? low : state->minimum;
  state->maximum = high > state->maximum ? high : state->maximum;
  state->latest = amax > state->latest ? amax : state->latest;
  state->total += finite;
}

/* Prefetches the counts that will be raised: where many histograms take turns, they have left the
 * cache. */
static void fetch_counts(const struct calib8_histogram_state* state, const int64_t* counts) {
  const double range = state->full_range;
  if (!(range > 0 && state->minimum >= -range && state->maximum <= range))
    return; /* nothing was counted yet */
  const float scale = scale_of(range);
  const size_t end = cell_of((float)state->maximum, scale);
  for (size_t k = cell_of((float)state->minimum, scale); k <= end; k += COUNTS_PER_LINE) {
    PREFETCH_TO_WRITE(counts + k);
  }
}

/* Counts one chunk. Most chunks lie in the current range, so that is tried first. */
static int64_t observe_chunk(const struct method* method, struct calib8_histogram_state* state,
                             int64_t* counts, const float* x, size_t n, uint16_t* tables) {
  struct extremes extremes;
  int64_t nan = 0, infinite = 0;
  if (n > MAX_DIRECT_VALUES) fetch_counts(state, counts);
  if (!(state->full_range > 0 && count_in_range(method, state, counts, x, n, tables, &extremes))) {
    extremes = find_chunk_extremes(method, x, n);
    if (!is_within(&extremes, FLT_MAX)) extremes = count_nonfinite(x, n, &nan, &infinite);
    if (nan > 0) return nan;
    state->infinite += infinite;
    if ((int64_t)n == infinite) return 0;
    widen(state, counts, amax_of(&extremes));
    if (state->full_range <= 0)
      counts[CALIB8_BINS] += (int64_t)n - infinite;
    else if (infinite > 0)
      count_finite(state->full_range, counts, x, n);
    else
      count_in_range(method, state, counts, x, n, tables, &extremes);
  }
  update_state(state, &extremes, (int64_t)n - infinite);
  if (state->base > 0) calib8_close(counts);
  return 0;
}

/* Whether no index can exceed the bins. */
static int is_valid_range(double full_range) {
  return full_range == 0 || (full_range >= CALIB8_SMALLEST_RANGE && full_range <= DBL_MAX);
}

int64_t calib8_observe(int method, struct calib8_histogram_state* state, int64_t* counts,
                       const float* values, size_t count, void* scratch) {
  const int method_count = calib8_kernel_ways();
  if (method < 0 || method >= method_count || !is_valid_range(state->full_range)) return -1;
  const struct method* implementation = &METHODS[method];
  state->latest = 0;
  for (size_t offset = 0; offset < count; offset += CHUNK) {
    const size_t size = smaller_size(count - offset, CHUNK);
    const int64_t nan =
        observe_chunk(implementation, state, counts, values + offset, size, scratch);
    if (nan > 0) return nan;
  }
  return 0;
}

int64_t calib8_observe_each(int method, size_t number, struct calib8_histogram_state* const* states,
                            int64_t* const* counts, const float* const* values, const size_t* sizes,
                            void* scratch, size_t* done) {
  for (*done = 0; *done < number; ++*done) {
    const size_t k = *done;
    const int64_t result =
        calib8_observe(method, states[k], counts[k], values[k], sizes[k], scratch);
    if (result != 0) return result;
  }
  return 0;
}
