/* A chunk of values, in blocks that stay in the core's first cache:
 *
 *   values --> least, greatest, index trunc(x * BINS / R) --> indices other than 0 --> raise
 *                    |
 *                    '- beyond R, NaN, Inf: the chunk is looked at as a whole, and counted anew
 *
 *   table 0   table 1   ...             counters of 16 bits, raised in turns, so that equal
 *      |         |       |              indices do not wait for each other
 *      '---------+------ +              folded between least and greatest after each chunk
 *                        |
 *                     counts            and what was not raised is bin 0
 *
 * Values that stand side by side are often equal. So eight places of a block that are far from each
 * other are gone through at once, and two tables are enough; but for many zeros, which are equal
 * wherever they are, and for whole chunks, which two tables do not hold.
 *
 * No value is lost: a chunk raises no counter of a table more often than 16 bits can tell. */
#include "count.h"

#include <float.h>
#include <math.h>
#include <string.h>

#if defined(__FAST_MATH__) || FLT_EVAL_METHOD != 0
#error "the bins are those of float32 arithmetic as IEEE 754 has it"
#endif

#if defined(__GNUC__)
#define INLINE static inline __attribute__((always_inline))
#define SOON(at) __builtin_prefetch(at, 0, 1)
#define SOON_WRITTEN(at) __builtin_prefetch(at, 1, 1)
#else
#define INLINE static inline
#define SOON(at) (void)(at)
#define SOON_WRITTEN(at) (void)(at)
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
  FEW = 1 << 11, /* values that are not worth the folding of tables */
  SPARE = 16,    /* places behind the indices of a block: a vector is stored as a whole */
  TABLES = 4,
  FAR_TABLES = 2,
  FAR_MOST = CHUNK - 128, /* values that these hold, though every block may have an odd one */
  COUNTS = 8,             /* in a line of a cache */
  FLOATS = 16,            /* in a line of a cache */
  AT_ONCE = 16,           /* indices, one after the other */
  FAR = 8,                /* places of a block */
  STRIDE = 8256 /* counters from table to table: their equal bins lie in other lines of a cache */
};

_Static_assert(TABLES* STRIDE * sizeof(uint16_t) == CALIB8_SCRATCH, "the tables fill the scratch");
_Static_assert(STRIDE >= CALIB8_CELLS, "a table holds every bin");
_Static_assert(CHUNK / TABLES <= UINT16_MAX, "a chunk overflows no counter");
_Static_assert(FAR_MOST / FAR_TABLES + CHUNK / BLOCK <= UINT16_MAX,
               "nor does a smaller one of two");

/* What a block or a chunk holds. */
struct extremes {
  float low, high; /* of all values; nothing is meant by them where there is a NaN */
  int nan;         /* whether there is one */
};

/* One way of counting. */
struct way {
  const char* name;
  int zeros; /* whether `index` gives those that are 0 */
  /* Extremes of up to BLOCK values. */
  struct extremes (*look)(const float* x, size_t n);
  /* The same, and indices to `out`, but for those that are 0 or not. Gives how many there are.
   * Where |x| * scale is beyond BINS the indices mean nothing. */
  size_t (*index)(const float* x, size_t n, float scale, int32_t* out, struct extremes* seen);
  /* Adds the bins `from` to `to` of all tables, or of those that are far, and clears them. */
  void (*fold)(uint16_t* tables, int far, int64_t* counts, size_t from, size_t to);
};

/* ---- in plain C, which compilers make vectors of -------------------------------------------- */

/* Whole numbers in the order of the floats: -NaN < -inf < ... < -0 < 0 < ... < inf < NaN. */
INLINE int32_t key_of(float x) {
  int32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits ^ ((bits >> 31) & INT32_MAX);
}

INLINE float of_key(int32_t key) {
  const int32_t bits = key ^ ((key >> 31) & INT32_MAX);
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

INLINE struct extremes of_keys(int32_t low, int32_t high) {
  const int nan = low < key_of(-INFINITY) || high > key_of(INFINITY);
  return (struct extremes){of_key(low), of_key(high), nan};
}

INLINE struct extremes look(const float* x, size_t n) {
  int32_t low = INT32_MAX, high = INT32_MIN;
  for (size_t k = 0; k < n; ++k) {
    const int32_t key = key_of(x[k]);
    low = key < low ? key : low;
    high = key > high ? key : high;
  }
  return of_keys(low, high);
}

INLINE size_t index_all(const float* x, size_t n, float scale, int32_t* out,
                        struct extremes* seen) {
  const float end = CALIB8_BINS; /* no larger number is cast */
  int32_t low = INT32_MAX, high = INT32_MIN;
  for (size_t k = 0; k < n; ++k) {
    const int32_t key = key_of(x[k]);
    low = key < low ? key : low;
    high = key > high ? key : high;
    float place = x[k] * scale;
    place = place < end ? place : end; /* NaN is not less */
    place = place > -end ? place : -end;
    out[k] = (int32_t)place;
  }
  *seen = of_keys(low, high);
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

INLINE void fold_all(uint16_t* tables, int far, int64_t* counts, size_t from, size_t to) {
  if (far)
    fold_of(tables, FAR_TABLES, counts, from, to);
  else
    fold_of(tables, TABLES, counts, from, to);
}

static struct extremes look_plain(const float* x, size_t n) { return look(x, n); }

static size_t index_plain(const float* x, size_t n, float scale, int32_t* out,
                          struct extremes* seen) {
  return index_all(x, n, scale, out, seen);
}

static void fold_plain(uint16_t* tables, int far, int64_t* counts, size_t from, size_t to) {
  fold_all(tables, far, counts, from, to);
}

#if X86

FOR("avx2") static struct extremes look_avx2(const float* x, size_t n) { return look(x, n); }

FOR("avx2")
static size_t index_avx2(const float* x, size_t n, float scale, int32_t* out,
                         struct extremes* seen) {
  return index_all(x, n, scale, out, seen);
}

FOR("avx2")
static void fold_avx2(uint16_t* tables, int far, int64_t* counts, size_t from, size_t to) {
  fold_all(tables, far, counts, from, to);
}

/* ---- AVX-512, which can leave out the zeros ------------------------------------------------- */

struct wide {
  __m512 low, high;
  __mmask16 nan;
};

/* Up to 16 values, those of the mask; gives where the next index goes. */
FOR("avx512f,avx512bw,popcnt")
INLINE int32_t* step(const float* x, __mmask16 there, __m512 by, int32_t* out, struct wide* seen) {
  const __m512 v = _mm512_maskz_loadu_ps(there, x);
  seen->low = _mm512_mask_min_ps(seen->low, there, v, seen->low); /* NaN gives the second */
  seen->high = _mm512_mask_max_ps(seen->high, there, v, seen->high);
  seen->nan |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  const __m512i bins = _mm512_cvttps_epi32(_mm512_mul_ps(v, by));
  const __mmask16 kept = _mm512_test_epi32_mask(bins, bins);
  _mm512_storeu_si512(out, _mm512_maskz_compress_epi32(kept, bins));
  return out + _mm_popcnt_u32(kept);
}

FOR("avx512f,avx512bw,popcnt")
static size_t index_avx512(const float* x, size_t n, float scale, int32_t* out,
                           struct extremes* seen) {
  const __m512 by = _mm512_set1_ps(scale);
  struct wide wide = {_mm512_set1_ps(INFINITY), _mm512_set1_ps(-INFINITY), 0};
  int32_t* next = out;
  size_t k = 0;
  for (; k + 16 <= n; k += 16) next = step(x + k, 0xFFFF, by, next, &wide);
  next = step(x + k, (__mmask16)((1U << (n - k)) - 1U), by, next, &wide);
  *seen = (struct extremes){_mm512_reduce_min_ps(wide.low), _mm512_reduce_max_ps(wide.high),
                            wide.nan != 0};
  return (size_t)(next - out);
}

FOR("avx512f,avx512bw")
static struct extremes look_avx512(const float* x, size_t n) { return look(x, n); }

FOR("avx512f,avx512bw")
static void fold_avx512(uint16_t* tables, int far, int64_t* counts, size_t from, size_t to) {
  fold_all(tables, far, counts, from, to);
}

#endif

#if defined(__aarch64__)
#define PLAIN "neon" /* every aarch64 has it, and compilers use it */
#else
#define PLAIN "plain"
#endif

static const struct way WAYS[] = {
    {PLAIN, 1, look_plain, index_plain, fold_plain},
#if X86
    {"avx2", 1, look_avx2, index_avx2, fold_avx2},
    {"avx512", 0, look_avx512, index_avx512, fold_avx512},
#endif
};

int calib8_kernel_form(void) { return CALIB8_KERNEL_FORM; }

int calib8_kernel_ways(void) {
#if X86
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2")) return 1;
  const int wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("popcnt");
  return wide ? 3 : 2;
#else
  return 1;
#endif
}

const char* calib8_kernel_way(int way) {
  return way >= 0 && way < (int)(sizeof WAYS / sizeof *WAYS) ? WAYS[way].name : NULL;
}

/* ---- the range ------------------------------------------------------------------------------ */

double calib8_range_for(double amax) {
  int exponent = 0;
  const double least = amax > CALIB8_SMALLEST_RANGE ? amax : CALIB8_SMALLEST_RANGE;
  const double mantissa = frexp(least, &exponent);
  return ldexp(1.0, mantissa == 0.5 ? exponent - 1 : exponent);
}

void calib8_halve(int64_t* counts) {
  int64_t* up = counts + CALIB8_BINS; /* index k goes to trunc(k / 2) */
  up[0] += up[1] + up[-1];
  for (ptrdiff_t k = 1; k < CALIB8_BINS / 2; ++k) {
    up[k] = up[2 * k] + up[2 * k + 1];
    up[-k] = up[-2 * k] + up[-2 * k - 1];
  }
  up[CALIB8_BINS / 2] = up[CALIB8_BINS];
  up[-CALIB8_BINS / 2] = up[-CALIB8_BINS];
  const size_t rest = CALIB8_BINS / 2 * sizeof *counts;
  memset(up + CALIB8_BINS / 2 + 1, 0, rest);
  memset(counts, 0, rest);
}

void calib8_close(int64_t* counts) {
  counts[1] += counts[0];
  counts[CALIB8_CELLS - 2] += counts[CALIB8_CELLS - 1];
  counts[0] = counts[CALIB8_CELLS - 1] = 0;
}

static void widen(struct calib8_seen* seen, int64_t* counts, double amax) {
  if (amax <= seen->full_range) return;
  double target = calib8_range_for(amax);
  if (seen->base > 0) {
    target = seen->full_range > 0 ? seen->full_range : seen->base;
    while (target < amax) target *= 2;
  }
  if (seen->full_range <= 0) seen->full_range = target;
  for (; seen->full_range < target; seen->full_range *= 2) calib8_halve(counts);
}

/* ---- a chunk -------------------------------------------------------------------------------- */

static double amax_of(const struct extremes* seen) {
  const double low = fabs((double)seen->low), high = fabs((double)seen->high);
  return low > high ? low : high;
}

static int within(const struct extremes* seen, double range) {
  return !seen->nan && amax_of(seen) <= range;
}

static void join(struct extremes* whole, const struct extremes* part) {
  whole->low = part->low < whole->low ? part->low : whole->low;
  whole->high = part->high > whole->high ? part->high : whole->high;
  whole->nan |= part->nan;
}

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

static const struct extremes NOTHING = {INFINITY, -INFINITY, 0};

static struct extremes look_at(const struct way* way, const float* x, size_t n) {
  struct extremes whole = NOTHING;
  for (size_t at = 0; at < n; at += BLOCK) {
    const struct extremes part = way->look(x + at, smaller(n - at, BLOCK));
    join(&whole, &part);
  }
  return whole;
}

static float scale_of(double full_range) { return (float)(CALIB8_BINS / full_range); }

static size_t cell_of(float x, float scale) {
  return (size_t)((ptrdiff_t)(x * scale) + CALIB8_BINS); /* the cast truncates */
}

/* Raises the counters of the indices; meanwhile the values behind `next` come nearer, two lines of a
 * cache for sixteen indices, since zeros may have none. */
static void raise_near(uint16_t* tables, const int32_t* index, size_t n, const float* next) {
  uint16_t* zero = tables + CALIB8_BINS;
  size_t k = 0;
  for (; k + AT_ONCE <= n; k += AT_ONCE) {
    SOON(next + 2 * k);
    SOON(next + 2 * k + FLOATS);
    for (size_t t = 0; t < AT_ONCE; ++t) {
      uint16_t* counter = zero + t % TABLES * STRIDE + index[k + t];
      *counter = (uint16_t)(*counter + 1);
    }
  }
  for (; k < n; ++k) {
    uint16_t* counter = zero + k % TABLES * STRIDE + index[k];
    *counter = (uint16_t)(*counter + 1);
  }
}

/* The same from eight places at once. */
static void raise_far(uint16_t* tables, const int32_t* index, size_t n, const float* next) {
  uint16_t* zero = tables + CALIB8_BINS;
  const size_t part = n / FAR;
  for (size_t k = 0; k < part; ++k) {
    SOON(next + FLOATS * k);
    for (size_t t = 0; t < FAR; ++t) {
      uint16_t* counter = zero + t % FAR_TABLES * STRIDE + index[t * part + k];
      *counter = (uint16_t)(*counter + 1);
    }
  }
  for (size_t k = FAR * part; k < n; ++k) {
    uint16_t* counter = zero + k % FAR_TABLES * STRIDE + index[k];
    *counter = (uint16_t)(*counter + 1);
  }
}

/* Counts values by tables that are folded at the end. Gives whether all lay in the range; where one
 * does not, nothing is counted. */
static int tally_many(const struct way* way, int far, double full_range, int64_t* counts,
                      const float* x, size_t n, uint16_t* tables, struct extremes* seen) {
  const float scale = scale_of(full_range);
  int32_t index[BLOCK + SPARE];
  size_t raised = 0;
  int inside = 1;
  *seen = NOTHING;
  for (size_t at = 0; at < n && inside; at += BLOCK) {
    struct extremes part;
    const size_t found = way->index(x + at, smaller(n - at, BLOCK), scale, index, &part);
    inside = within(&part, full_range);
    if (inside) {
      (far ? raise_far : raise_near)(tables, index, found, x + smaller(at + BLOCK, n));
      raised += found;
      join(seen, &part);
    }
  }
  if (raised > 0) {
    const size_t from = cell_of(seen->low, scale), to = cell_of(seen->high, scale);
    if (inside)
      way->fold(tables, far, counts, from, to);
    else
      clear(tables, TABLES, from, to);
  }
  if (inside) counts[CALIB8_BINS] += (int64_t)(n - raised);
  return inside;
}

/* The same of at most FEW values. */
static int tally_few(const struct way* way, double full_range, int64_t* counts, const float* x,
                     size_t n, struct extremes* seen) {
  int32_t index[FEW + SPARE];
  const size_t found = way->index(x, n, scale_of(full_range), index, seen);
  if (!within(seen, full_range)) return 0;
  for (size_t k = 0; k < found; ++k) counts[CALIB8_BINS + index[k]] += 1;
  counts[CALIB8_BINS] += (int64_t)(n - found);
  return 1;
}

static int tally(const struct way* way, const struct calib8_seen* before, int64_t* counts,
                 const float* x, size_t n, uint16_t* tables, struct extremes* seen) {
  const double range = before->full_range;
  const int zeros = way->zeros && before->minimum >= 0; /* most likely many: behind a Relu */
  const int far = n <= FAR_MOST && !zeros;
  if (n <= FEW) return tally_few(way, range, counts, x, n, seen);
  return tally_many(way, far, range, counts, x, n, tables, seen);
}

/* Counts the finite ones of values of which some are infinite. */
static void count_finite(double full_range, int64_t* counts, const float* x, size_t n) {
  const float scale = scale_of(full_range);
  for (size_t k = 0; k < n; ++k) {
    if (!isinf(x[k])) counts[cell_of(x[k], scale)] += 1;
  }
}

/* Values that are no numbers, counted; the extremes of the finite ones. */
static struct extremes look_closely(const float* x, size_t n, int64_t* nan, int64_t* infinite) {
  struct extremes finite = NOTHING;
  for (size_t k = 0; k < n; ++k) {
    if (isnan(x[k])) {
      *nan += 1;
    } else if (isinf(x[k])) {
      *infinite += 1;
    } else {
      const struct extremes one = {x[k], x[k], 0};
      join(&finite, &one);
    }
  }
  return finite;
}

static void note(struct calib8_seen* seen, const struct extremes* found, int64_t finite) {
  /* + 0: of two zeros that are equal, the one without a sign */
  const double low = (double)found->low + 0.0, high = (double)found->high + 0.0;
  const double amax = amax_of(found);
  seen->minimum = low < seen->minimum ? low : seen->minimum;
  seen->maximum = high > seen->maximum ? high : seen->maximum;
  seen->latest = amax > seen->latest ? amax : seen->latest;
  seen->total += finite;
}

/* Where many histograms take turns, each one's counts have gone far away: those that will be added to
 * come nearer while the values are looked at. */
static void fetch_counts(const struct calib8_seen* seen, const int64_t* counts) {
  const double range = seen->full_range;
  if (!(range > 0 && seen->minimum >= -range && seen->maximum <= range)) return; /* none yet */
  const float scale = scale_of(range);
  const size_t end = cell_of((float)seen->maximum, scale);
  for (size_t k = cell_of((float)seen->minimum, scale); k <= end; k += COUNTS) {
    SOON_WRITTEN(counts + k);
  }
}

/* One chunk. Most of them lie in the range that is known: that is tried first. */
static int64_t observe_chunk(const struct way* way, struct calib8_seen* seen, int64_t* counts,
                             const float* x, size_t n, uint16_t* tables) {
  struct extremes found;
  int64_t nan = 0, infinite = 0;
  if (n > FEW) fetch_counts(seen, counts);
  if (!(seen->full_range > 0 && tally(way, seen, counts, x, n, tables, &found))) {
    found = look_at(way, x, n);
    if (!within(&found, FLT_MAX)) found = look_closely(x, n, &nan, &infinite);
    if (nan > 0) return nan;
    seen->infinite += infinite;
    if ((int64_t)n == infinite) return 0;
    widen(seen, counts, amax_of(&found));
    if (seen->full_range <= 0)
      counts[CALIB8_BINS] += (int64_t)n - infinite;
    else if (infinite > 0)
      count_finite(seen->full_range, counts, x, n);
    else
      tally(way, seen, counts, x, n, tables, &found);
  }
  note(seen, &found, (int64_t)n - infinite);
  if (seen->base > 0) calib8_close(counts);
  return 0;
}

/* Whether no index can lie beyond the bins. */
static int sound(double full_range) {
  return full_range == 0 || (full_range >= CALIB8_SMALLEST_RANGE && full_range <= DBL_MAX);
}

int64_t calib8_observe(int way, struct calib8_seen* seen, int64_t* counts, const float* values,
                       size_t count, void* scratch) {
  const int ways = calib8_kernel_ways();
  if (way < 0 || way >= ways || !sound(seen->full_range)) return -1;
  const struct way* chosen = &WAYS[way];
  seen->latest = 0;
  for (size_t at = 0; at < count; at += CHUNK) {
    const size_t size = smaller(count - at, CHUNK);
    const int64_t nan = observe_chunk(chosen, seen, counts, values + at, size, scratch);
    if (nan > 0) return nan;
  }
  return 0;
}

int64_t calib8_observe_each(int way, size_t number, struct calib8_seen* const* seen,
                            int64_t* const* counts, const float* const* values, const size_t* sizes,
                            void* scratch, size_t* done) {
  for (*done = 0; *done < number; ++*done) {
    const size_t k = *done;
    const int64_t odd = calib8_observe(way, seen[k], counts[k], values[k], sizes[k], scratch);
    if (odd != 0) return odd;
  }
  return 0;
}
