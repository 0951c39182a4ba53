// Linear, cubic and Lanczos resizing: weights of 11 bits along the rows, then down the columns.
//
//   row y of the source --weights of x--> int32 row --weights of y, over 2, 4 or 8 such--> uint8
#include <algorithm>
#include <array>
#include <cfloat>
#include <cmath>
#include <vector>

#include "resize.hpp"

namespace calib8::resizing {
namespace {

constexpr int kMaxTaps = 8;
constexpr float kOne = 2048.0F;
constexpr float kCubicA = -0.75F;
constexpr double kPi = 3.1415926535897932384626433832795;

using Weights = std::array<float, kMaxTaps>;

// Which pixels of a side one of the result is made of: `taps` from `first`, which may lie outside.
struct FilterTaps {
  int taps = 0;
  std::vector<int> first;
  std::vector<int> weights;  // `taps` each, in 1/2048
};

Weights linear_weights(float x) { return {1.0F - x, x}; }

// Keys, "Cubic convolution interpolation for digital image processing", 1981, with a = -0.75.
Weights cubic_weights(float x) {
  constexpr float a = kCubicA;
  Weights w{};
  w[0] = ((a * (x + 1) - 5 * a) * (x + 1) + 8 * a) * (x + 1) - 4 * a;
  w[1] = ((a + 2) * x - (a + 3)) * x * x + 1;
  w[2] = ((a + 2) * (1 - x) - (a + 3)) * (1 - x) * (1 - x) + 1;
  w[3] = 1.0F - w[0] - w[1] - w[2];
  return w;
}

// sinc(t) sinc(t / 4) at t = x + 3 - k, made to add up to 1. The sine of the numerator is that of
// t = x + 3 turned by 45 degrees a step.
Weights lanczos_weights(float x) {
  constexpr double h = 0.70710678118654752440084436210485;
  constexpr double kTurns[kMaxTaps][2] = {{1, 0},  {-h, -h}, {0, 1},  {h, -h},
                                          {-1, 0}, {h, h},   {0, -1}, {-h, h}};
  Weights w{};
  float sum = 0.0F;
  const double start = -static_cast<double>(x + 3) * kPi * 0.25;
  const double sine = std::sin(start);
  const double cosine = std::cos(start);
  for (int k = 0; k < kMaxTaps; ++k) {
    const auto index = static_cast<std::size_t>(k);
    const float t = x + 3 - static_cast<float>(k);
    const double y = -static_cast<double>(t) * kPi * 0.25;
    // on a pixel itself the quotient has no value: so large that all others come out as 0
    w[index] = std::fabs(t) >= 1e-6F
                   ? static_cast<float>((kTurns[k][0] * sine + kTurns[k][1] * cosine) / (y * y))
                   : 1e30F;
    sum += w[index];
  }
  sum = 1.0F / sum;
  for (float& weight : w) weight *= sum;
  return w;
}

int taps_of(Interpolation kind) {
  return kind == Interpolation::kLinear ? 2 : kind == Interpolation::kCubic ? 4 : kMaxTaps;
}

Weights weights_at(Interpolation kind, float x) {
  if (kind == Interpolation::kLinear) return linear_weights(x);
  return kind == Interpolation::kCubic ? cubic_weights(x) : lanczos_weights(x);
}

FilterTaps make_side(int from, int to, Interpolation kind) {
  const double step = scale(from, to);
  FilterTaps side_taps;
  side_taps.taps = taps_of(kind);
  for (int k = 0; k < to; ++k) {
    const auto position = static_cast<float>((k + 0.5) * step - 0.5);
    const int pixel = static_cast<int>(std::floor(position));
    const Weights weights = weights_at(kind, position - static_cast<float>(pixel));
    side_taps.first.push_back(pixel - side_taps.taps / 2 + 1);
    for (int tap = 0; tap < side_taps.taps; ++tap) {
      const float weight = weights[static_cast<std::size_t>(tap)] * kOne;
      side_taps.weights.push_back(static_cast<int>(std::nearbyint(weight)));
    }
  }
  return side_taps;
}

// A row with its first and last pixel repeated `margin` times, so that no tap lies outside.
void pad_row(const std::uint8_t* row, int width, int channels, int margin, std::uint8_t* out) {
  const auto depth = static_cast<std::size_t>(channels);
  for (int k = 0; k < margin; ++k) out = std::copy_n(row, depth, out);
  const std::size_t length = static_cast<std::size_t>(width) * depth;
  out = std::copy_n(row, length, out);
  for (int k = 0; k < margin; ++k) out = std::copy_n(row + length - depth, depth, out);
}

template <int kTaps, int kChannels>
void filter_row(const std::uint8_t* padded_row, const FilterTaps& columns, int margin,
                std::int32_t* out) {
  const int* weights = columns.weights.data();
  for (const int first : columns.first) {
    const std::uint8_t* pixels = padded_row + (first + margin) * kChannels;
    for (int c = 0; c < kChannels; ++c) {
      std::int32_t sum = 0;
      for (int tap = 0; tap < kTaps; ++tap) sum += pixels[tap * kChannels + c] * weights[tap];
      *out++ = sum;
    }
    weights += kTaps;
  }
}

using RowFilter = void (*)(const std::uint8_t*, const FilterTaps&, int, std::int32_t*);

RowFilter row_filter_for(int taps, int channels) {
  if (channels == 1)
    return taps == 2 ? filter_row<2, 1> : taps == 4 ? filter_row<4, 1> : filter_row<8, 1>;
  return taps == 2 ? filter_row<2, 3> : taps == 4 ? filter_row<4, 3> : filter_row<8, 3>;
}

using Rows = std::array<const std::int32_t*, kMaxTaps>;

// 22 bits behind the point to none, halves up.
std::uint8_t round_to_pixel(std::int32_t sum) {
  return static_cast<std::uint8_t>(std::clamp((sum + (1 << 21)) >> 22, 0, 255));
}

void filter_columns_linear(const Rows& rows, const int* weights, std::size_t length,
                           std::uint8_t* out) {
  const std::int32_t* a = rows[0];
  const std::int32_t* b = rows[1];
  const int p = weights[0];
  const int q = weights[1];
  for (std::size_t k = 0; k < length; ++k) {
    const int sum = ((p * (a[k] >> 4)) >> 16) + ((q * (b[k] >> 4)) >> 16);
    out[k] = static_cast<std::uint8_t>((sum + 2) >> 2);
  }
}

// In float as far as vectors of eight reach, as x86's code has it, and whole numbers in what is left.
void filter_columns_cubic(const Rows& rows, const int* weights, std::size_t length,
                          std::uint8_t* out) {
  constexpr float kUnit = 1.0F / (kOne * kOne);
  const auto w = [weights](int k) { return static_cast<float>(weights[k]) * kUnit; };
  const float w0 = w(0);
  const float w1 = w(1);
  const float w2 = w(2);
  const float w3 = w(3);
  const std::size_t eights = length / 8 * 8;
  for (std::size_t k = 0; k < eights; ++k) {
    const auto in = [&rows, k](std::size_t row) { return static_cast<float>(rows[row][k]); };
    out[k] = rounded(in(0) * w0 + (in(1) * w1 + (in(2) * w2 + in(3) * w3)));
  }
  for (std::size_t k = eights; k < length; ++k) {
    out[k] = round_to_pixel(rows[0][k] * weights[0] + rows[1][k] * weights[1] +
                            rows[2][k] * weights[2] + rows[3][k] * weights[3]);
  }
}

void filter_columns_lanczos(const Rows& rows, const int* weights, std::size_t length,
                            std::uint8_t* out) {
  for (std::size_t k = 0; k < length; ++k) {
    std::int32_t sum = 0;
    for (std::size_t tap = 0; tap < kMaxTaps; ++tap) sum += rows[tap][k] * weights[tap];
    out[k] = round_to_pixel(sum);
  }
}

}  // namespace

Pixels filter(const Pixels& from, Size size, Interpolation kind) {
  Pixels out(size.height, size.width, from.channels);
  const FilterTaps column_taps = make_side(from.width, size.width, kind);
  const FilterTaps row_taps = make_side(from.height, size.height, kind);
  const int taps = column_taps.taps;
  const int margin = taps;  // a centre lies at most half a pixel outside
  const RowFilter filter_row_taps = row_filter_for(taps, from.channels);
  const auto filter_columns = taps == 2   ? filter_columns_linear
                              : taps == 4 ? filter_columns_cubic
                                          : filter_columns_lanczos;
  std::vector<std::uint8_t> padded_row(
      static_cast<std::size_t>((from.width + 2 * margin) * from.channels));
  // The rows in use, each in the place of its number: `taps` neighbours never share one.
  std::vector<std::vector<std::int32_t>> filtered_rows(static_cast<std::size_t>(taps),
                                                       std::vector<std::int32_t>(out.row_bytes()));
  std::vector<int> row_numbers(static_cast<std::size_t>(taps), -1);
  for (int y = 0; y < size.height; ++y) {
    Rows rows{};
    for (int tap = 0; tap < taps; ++tap) {
      const int first_row = row_taps.first[static_cast<std::size_t>(y)];
      const int row = std::clamp(first_row + tap, 0, from.height - 1);
      const auto slot = static_cast<std::size_t>(row % taps);
      if (row_numbers[slot] != row) {
        pad_row(from.row(row), from.width, from.channels, margin, padded_row.data());
        filter_row_taps(padded_row.data(), column_taps, margin, filtered_rows[slot].data());
        row_numbers[slot] = row;
      }
      rows[static_cast<std::size_t>(tap)] = filtered_rows[slot].data();
    }
    filter_columns(rows, row_taps.weights.data() + y * taps, out.row_bytes(), out.row(y));
  }
  return out;
}

}  // namespace calib8::resizing
