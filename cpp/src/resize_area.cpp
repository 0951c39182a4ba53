// Area resizing: each pixel of the result is the mean of the area of the source that it covers.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <vector>

#include "resize.hpp"

namespace calib8::resizing {
namespace {

// A pixel of the source, the one of the result that takes of it, and how much.
struct Share {
  int from = 0;
  int to = 0;
  float part = 0.0F;
};

constexpr double kSliver = 1e-3;  // of a pixel; less is left out

std::vector<Share> shares(int from, int to) {
  const double step = scale(from, to);
  std::vector<Share> made;
  for (int k = 0; k < to; ++k) {
    const double begin = k * step;
    const double end = begin + step;
    const double covered = std::min(step, from - begin);
    const int last = std::min(static_cast<int>(std::floor(end)), from - 1);
    const int first = std::min(static_cast<int>(std::ceil(begin)), last);
    if (first - begin > kSliver) {
      made.push_back({first - 1, k, static_cast<float>((first - begin) / covered)});
    }
    for (int at = first; at < last; ++at) {
      made.push_back({at, k, static_cast<float>(1.0 / covered)});
    }
    if (end - last > kSliver) {
      const double part = std::min(std::min(end - last, 1.0), covered);
      made.push_back({last, k, static_cast<float>(part / covered)});
    }
  }
  return made;
}

void gather(const std::uint8_t* row, const std::vector<Share>& columns, int channels,
            std::vector<float>& out) {
  std::fill(out.begin(), out.end(), 0.0F);
  for (const Share& share : columns) {
    const std::uint8_t* from = row + share.from * channels;
    float* to = out.data() + share.to * channels;
    for (int c = 0; c < channels; ++c) to[c] += static_cast<float>(from[c]) * share.part;
  }
}

Pixels by_shares(const Pixels& from, Size size) {
  Pixels out(size.height, size.width, from.channels);
  const std::vector<Share> columns = shares(from.width, size.width);
  std::vector<float> row(out.row_bytes());
  std::vector<float> sum(out.row_bytes());
  int line = 0;
  const auto settle = [&out, &sum](int y) {
    std::transform(sum.begin(), sum.end(), out.row(y), rounded);
    std::fill(sum.begin(), sum.end(), 0.0F);
  };
  for (const Share& share : shares(from.height, size.height)) {
    gather(from.row(share.from), columns, from.channels, row);
    if (share.to != line) {
      settle(line);
      line = share.to;
    }
    for (std::size_t k = 0; k < sum.size(); ++k) sum[k] += share.part * row[k];
  }
  settle(line);
  return out;
}

// Of 2 x 2 the mean with halves up, of other whole blocks a float with halves to even.
std::uint8_t mean(int sum, int high, int wide) {
  if (high == 2 && wide == 2) return static_cast<std::uint8_t>((sum + 2) >> 2);
  return rounded(static_cast<float>(sum) * (1.0F / static_cast<float>(high * wide)));
}

Pixels by_blocks(const Pixels& from, Size size, int high, int wide) {
  Pixels out(size.height, size.width, from.channels);
  const int channels = from.channels;
  std::vector<int> sum(out.row_bytes());
  for (int y = 0; y < size.height; ++y) {
    std::fill(sum.begin(), sum.end(), 0);
    for (int k = 0; k < high; ++k) {
      const std::uint8_t* source = from.row(y * high + k);
      for (int x = 0; x < size.width * channels; ++x) {
        const std::uint8_t* first = source + x / channels * wide * channels + x % channels;
        for (int j = 0; j < wide; ++j) sum[static_cast<std::size_t>(x)] += first[j * channels];
      }
    }
    std::transform(sum.begin(), sum.end(), out.row(y), [=](int s) { return mean(s, high, wide); });
  }
  return out;
}

// The whole number that a scale is, to the last bit; else 0.
int whole(double scale) {
  const auto near = static_cast<int>(std::nearbyint(scale));
  return std::fabs(scale - near) < DBL_EPSILON ? near : 0;
}

}  // namespace

Pixels area(const Pixels& from, Size size) {
  const int high = whole(scale(from.height, size.height));
  const int wide = whole(scale(from.width, size.width));
  return high > 0 && wide > 0 ? by_blocks(from, size, high, wide) : by_shares(from, size);
}

}  // namespace calib8::resizing
