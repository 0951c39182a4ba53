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

constexpr int kMostTaps = 8;
constexpr float kOne = 2048.0F;
constexpr float kCubicA = -0.75F;
constexpr double kPi = 3.1415926535897932384626433832795;

using Weights = std::array<float, kMostTaps>;

// Which pixels of a side one of the result is made of: `taps` from `first`, which may lie outside.
struct Side {
  int taps = 0;
  std::vector<int> first;
  std::vector<int> weights;  // `taps` each, in 1/2048
};

Weights linear(float x) { return {1.0F - x, x}; }

// Keys, "Cubic convolution interpolation for digital image processing", 1981, with a = -0.75.
Weights cubic(float x) {
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
Weights lanczos(float x) {
  constexpr double h = 0.70710678118654752440084436210485;
  constexpr double kTurns[kMostTaps][2] = {{1, 0},  {-h, -h}, {0, 1},  {h, -h},
                                           {-1, 0}, {h, h},   {0, -1}, {-h, h}};
  Weights w{};
  float sum = 0.0F;
  const double start = -static_cast<double>(x + 3) * kPi * 0.25;
  const double sine = std::sin(start);
  const double cosine = std::cos(start);
  for (int k = 0; k < kMostTaps; ++k) {
    const auto at = static_cast<std::size_t>(k);
    const float t = x + 3 - static_cast<float>(k);
    const double y = -static_cast<double>(t) * kPi * 0.25;
    // on a pixel itself the quotient has no value: so large that all others come out as 0
    w[at] = std::fabs(t) >= 1e-6F
                ? static_cast<float>((kTurns[k][0] * sine + kTurns[k][1] * cosine) / (y * y))
                : 1e30F;
    sum += w[at];
  }
  sum = 1.0F / sum;
  for (float& weight : w) weight *= sum;
  return w;
}

int taps_of(Interpolation kind) {
  return kind == Interpolation::kLinear ? 2 : kind == Interpolation::kCubic ? 4 : kMostTaps;
}

Weights weights_at(Interpolation kind, float x) {
  if (kind == Interpolation::kLinear) return linear(x);
  return kind == Interpolation::kCubic ? cubic(x) : lanczos(x);
}

Side side(int from, int to, Interpolation kind) {
  const double step = scale(from, to);
  Side made;
  made.taps = taps_of(kind);
  for (int k = 0; k < to; ++k) {
    const auto centre = static_cast<float>((k + 0.5) * step - 0.5);
    const int at = static_cast<int>(std::floor(centre));
    const Weights weights = weights_at(kind, centre - static_cast<float>(at));
    made.first.push_back(at - made.taps / 2 + 1);
    for (int tap = 0; tap < made.taps; ++tap) {
      const float weight = weights[static_cast<std::size_t>(tap)] * kOne;
      made.weights.push_back(static_cast<int>(std::nearbyint(weight)));
    }
  }
  return made;
}

// A row with its first and last pixel repeated `margin` times, so that no tap lies outside.
void widen(const std::uint8_t* row, int width, int channels, int margin, std::uint8_t* out) {
  const auto depth = static_cast<std::size_t>(channels);
  for (int k = 0; k < margin; ++k) out = std::copy_n(row, depth, out);
  const std::size_t length = static_cast<std::size_t>(width) * depth;
  out = std::copy_n(row, length, out);
  for (int k = 0; k < margin; ++k) out = std::copy_n(row + length - depth, depth, out);
}

template <int kTaps, int kChannels>
void across(const std::uint8_t* wide, const Side& columns, int margin, std::int32_t* out) {
  const int* weights = columns.weights.data();
  for (const int first : columns.first) {
    const std::uint8_t* from = wide + (first + margin) * kChannels;
    for (int c = 0; c < kChannels; ++c) {
      std::int32_t sum = 0;
      for (int tap = 0; tap < kTaps; ++tap) sum += from[tap * kChannels + c] * weights[tap];
      *out++ = sum;
    }
    weights += kTaps;
  }
}

using Across = void (*)(const std::uint8_t*, const Side&, int, std::int32_t*);

Across across_for(int taps, int channels) {
  if (channels == 1) return taps == 2 ? across<2, 1> : taps == 4 ? across<4, 1> : across<8, 1>;
  return taps == 2 ? across<2, 3> : taps == 4 ? across<4, 3> : across<8, 3>;
}

using Rows = std::array<const std::int32_t*, kMostTaps>;

// 22 bits behind the point to none, halves up.
std::uint8_t settled(std::int32_t sum) {
  return static_cast<std::uint8_t>(std::clamp((sum + (1 << 21)) >> 22, 0, 255));
}

void down_linear(const Rows& rows, const int* weights, std::size_t length, std::uint8_t* out) {
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
void down_cubic(const Rows& rows, const int* weights, std::size_t length, std::uint8_t* out) {
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
    out[k] = settled(rows[0][k] * weights[0] + rows[1][k] * weights[1] + rows[2][k] * weights[2] +
                     rows[3][k] * weights[3]);
  }
}

void down_lanczos(const Rows& rows, const int* weights, std::size_t length, std::uint8_t* out) {
  for (std::size_t k = 0; k < length; ++k) {
    std::int32_t sum = 0;
    for (std::size_t tap = 0; tap < kMostTaps; ++tap) sum += rows[tap][k] * weights[tap];
    out[k] = settled(sum);
  }
}

}  // namespace

Pixels filter(const Pixels& from, Size size, Interpolation kind) {
  Pixels out(size.height, size.width, from.channels);
  const Side columns = side(from.width, size.width, kind);
  const Side lines = side(from.height, size.height, kind);
  const int taps = columns.taps;
  const int margin = taps;  // a centre lies at most half a pixel outside
  const Across go_across = across_for(taps, from.channels);
  const auto down = taps == 2 ? down_linear : taps == 4 ? down_cubic : down_lanczos;
  std::vector<std::uint8_t> wide(
      static_cast<std::size_t>((from.width + 2 * margin) * from.channels));
  // The rows in use, each in the place of its number: `taps` neighbours never share one.
  std::vector<std::vector<std::int32_t>> kept(static_cast<std::size_t>(taps),
                                              std::vector<std::int32_t>(out.row_bytes()));
  std::vector<int> held(static_cast<std::size_t>(taps), -1);
  for (int y = 0; y < size.height; ++y) {
    Rows rows{};
    for (int tap = 0; tap < taps; ++tap) {
      const int first = lines.first[static_cast<std::size_t>(y)];
      const int row = std::clamp(first + tap, 0, from.height - 1);
      const auto place = static_cast<std::size_t>(row % taps);
      if (held[place] != row) {
        widen(from.row(row), from.width, from.channels, margin, wide.data());
        go_across(wide.data(), columns, margin, kept[place].data());
        held[place] = row;
      }
      rows[static_cast<std::size_t>(tap)] = kept[place].data();
    }
    down(rows, lines.weights.data() + y * taps, out.row_bytes(), out.row(y));
  }
  return out;
}

}  // namespace calib8::resizing
