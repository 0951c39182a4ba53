/* What one writes first: the loops that benchmarks/counting_cost.py holds the others against. */
#include <math.h>
#include <stdint.h>

enum { SIDE = 4096, BINS = 2048, LEVELS = 128 };

/* Extremes, then a counter for every value; the range is known. */
void plain_count(const float* x, int64_t n, float scale, int64_t* counts, float* extremes) {
  for (int64_t k = 0; k < n; ++k) {
    extremes[0] = x[k] < extremes[0] ? x[k] : extremes[0];
    extremes[1] = x[k] > extremes[1] ? x[k] : extremes[1];
  }
  for (int64_t k = 0; k < n; ++k) counts[SIDE + (int)(x[k] * scale)] += 1;
}

/* The KL divergence of keeping the first i bins, summed as it is written in the paper. */
static double divergence(const double* h, int i) {
  double sums[LEVELS] = {0}, occupied[LEVELS] = {0}, p_sum = 0, q_sum = 0, outliers = 0, kl = 0;
  for (int j = i; j < BINS; ++j) outliers += h[j];
  for (int j = 0; j < i; ++j) {
    sums[j * LEVELS / i] += h[j];
    occupied[j * LEVELS / i] += h[j] > 0;
    p_sum += h[j];
  }
  q_sum = p_sum;
  p_sum += outliers;
  if (!(q_sum > 0) || (outliers > 0 && !(h[i - 1] > 0))) return INFINITY;
  for (int j = 0; j < i; ++j) {
    if (!(h[j] > 0)) continue;
    const int level = j * LEVELS / i;
    const double p = (h[j] + (j == i - 1 ? outliers : 0)) / p_sum;
    kl += p * log(p / (sums[level] / occupied[level] / q_sum));
  }
  return kl;
}

int plain_entropy(const int64_t* counts) {
  double h[BINS];
  for (int j = 0; j < BINS; ++j) h[j] = j ? (double)counts[j] : 0.0;
  double best = INFINITY;
  int winner = BINS;
  for (int i = LEVELS; i <= BINS; ++i) {
    const double kl = divergence(h, i);
    if (kl <= best) {
      best = kl;
      winner = i;
    }
  }
  return winner;
}
