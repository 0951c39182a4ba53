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

std::vector<Share> make_shares(int from, int to) {
  const double step = scale(from, to);
  std::vector<Share> shares;
  for (int k = 0; k < to; ++k) {
    const double begin = k * step;
    const double end = begin + step;
    const double covered_length = std::min(step, from - begin);
    const int last_pixel = std::min(static_cast<int>(std::floor(end)), from - 1);
    const int first_pixel = std::min(static_cast<int>(std::ceil(begin)), last_pixel);
    if (first_pixel - begin > kSliver) {
      shares.push_back(
          {first_pixel - 1, k, static_cast<float>((first_pixel - begin) / covered_length)});
    }
    for (int pixel = first_pixel; pixel < last_pixel; ++pixel) {
      shares.push_back({pixel, k, static_cast<float>(1.0 / covered_length)});
    }
    if (end - last_pixel > kSliver) {
      const double covered_part = std::min(std::min(end - last_pixel, 1.0), covered_length);
      shares.push_back({last_pixel, k, static_cast<float>(covered_part / covered_length)});
    }
  }
  return shares;
}

void sum_columns(const std::uint8_t* row, const std::vector<Share>& columns, int channels,
                 std::vector<float>& out) {
  std::fill(out.begin(), out.end(), 0.0F);
  for (const Share& share : columns) {
    const std::uint8_t* from = row + share.from * channels;
    float* to = out.data() + share.to * channels;
    for (int c = 0; c < channels; ++c) to[c] += static_cast<float>(from[c]) * share.part;
  }
}

Pixels resize_by_shares(const Pixels& from, Size size) {
  Pixels out(size.height, size.width, from.channels);
  const std::vector<Share> columns = make_shares(from.width, size.width);
  std::vector<float> row(out.row_bytes());
  std::vector<float> sum(out.row_bytes());
  int row_index = 0;
  const auto store_row = [&out, &sum](int y) {
    std::transform(sum.begin(), sum.end(), out.row(y), rounded);
    std::fill(sum.begin(), sum.end(), 0.0F);
  };
  for (const Share& share : make_shares(from.height, size.height)) {
    sum_columns(from.row(share.from), columns, from.channels, row);
    if (share.to != row_index) {
      store_row(row_index);
      row_index = share.to;
    }
    for (std::size_t k = 0; k < sum.size(); ++k) sum[k] += share.part * row[k];
  }
  store_row(row_index);
  return out;
}

// Of 2 x 2 the mean with halves up, of other whole blocks a float with halves to even.
std::uint8_t block_mean(int sum, int block_height, int block_width) {
  if (block_height == 2 && block_width == 2) return static_cast<std::uint8_t>((sum + 2) >> 2);
  return rounded(static_cast<float>(sum) * (1.0F / static_cast<float>(block_height * block_width)));
}

Pixels resize_by_blocks(const Pixels& from, Size size, int block_height, int block_width) {
  Pixels out(size.height, size.width, from.channels);
  const int channels = from.channels;
  std::vector<int> sum(out.row_bytes());
  for (int y = 0; y < size.height; ++y) {
    std::fill(sum.begin(), sum.end(), 0);
    for (int k = 0; k < block_height; ++k) {
      const std::uint8_t* source = from.row(y * block_height + k);
      for (int x = 0; x < size.width * channels; ++x) {
        const std::uint8_t* first = source + x / channels * block_width * channels + x % channels;
        for (int j = 0; j < block_width; ++j)
          sum[static_cast<std::size_t>(x)] += first[j * channels];
      }
    }
    std::transform(sum.begin(), sum.end(), out.row(y),
                   [=](int s) { return block_mean(s, block_height, block_width); });
  }
  return out;
}

// The whole number that a scale is, to the last bit; else 0.
int integer_factor(double scale) {
  const auto nearest = static_cast<int>(std::nearbyint(scale));
  return std::fabs(scale - nearest) < DBL_EPSILON ? nearest : 0;
}

}  // namespace

Pixels area(const Pixels& from, Size size) {
  const int block_height = integer_factor(scale(from.height, size.height));
  const int block_width = integer_factor(scale(from.width, size.width));
  return block_height > 0 && block_width > 0
             ? resize_by_blocks(from, size, block_height, block_width)
             : resize_by_shares(from, size);
}

}  // namespace calib8::resizing
