/* One row at a time: its slopes stay in the core's first cache, and only a weight that moves reads
 * its row of H. Rows know nothing of each other, so their order changes nothing. */
#include "round.h"

static void add(double* restrict slope, const double* restrict products, double by,
                size_t columns) {
  for (size_t at = 0; at < columns; at++) {
    slope[at] += by * products[at];
  }
}

static int64_t sweep(size_t columns, const double* low, const double* high, double* integers,
                     double* slope, const double* products, double damp, const uint8_t* fixed) {
  int64_t moved = 0;
  for (size_t k = 0; k < columns; k++) {
    double other = low[k] + high[k] - integers[k];
    double step = other - integers[k];
    double change = 2 * step * slope[k] + step * step * (products[k * columns + k] + damp);
    if (change < 0 && !fixed[k]) {
      integers[k] = other;
      add(slope, products + k * columns, step, columns);
      slope[k] += step * damp;
      moved++;
    }
  }
  return moved;
}

int64_t calib8_round(size_t rows, size_t columns, int sweeps, const double* low, const double* high,
                     double* integers, double* slope, const double* products, double damp,
                     const uint8_t* fixed) {
  int64_t moves = 0;
  for (size_t row = 0; row < rows; row++) {
    size_t at = row * columns;
    for (int done = 0; done < sweeps; done++) {
      int64_t moved = sweep(columns, low + at, high + at, integers + at, slope + at, products, damp,
                            fixed + at);
      moves += moved;
      if (!moved) {
        break;
      }
    }
  }
  return moves;
}
