// Calibrates a model's input from a folder of images and writes a TensorRT calibration cache:
//
//   calibrate_images photos/ imagenet 224 data.cache
//
// A calibrator for all tensors does the same with the activations that its runtime gives it:
// one Histogram a tensor, observe() for every batch, one search at the end.
#include <calib8/cache.hpp>
#include <calib8/entropy.hpp>
#include <calib8/errors.hpp>
#include <calib8/feed.hpp>
#include <calib8/files.hpp>
#include <calib8/histogram.hpp>
#include <cstdlib>
#include <iostream>

namespace {

void calibrate(const std::string& images, const std::string& preset, int side,
               const std::string& out) {
  calib8::FeedOptions options;
  options.preprocess = calib8::preset(preset);
  options.skip_bad = true;
  const int channels = options.preprocess->channels();
  const calib8::TensorSpec input{"data", "float32", {"batch", channels, side, side}};

  // Images are decoded by a thread of the feed while this one counts.
  const calib8::Feed feed(images, input, options);
  calib8::Histogram histogram;
  const auto samples = feed.samples();
  while (const auto sample = samples->next()) {
    histogram.observe(sample->front().floats(), sample->front().bytes.size() / sizeof(float));
  }
  for (const std::string& note : feed.notes()) std::cout << "note: " << note << "\n";

  const calib8::Scale scale = calib8::entropy::scale(histogram);
  const auto cache = calib8::cache_from_scales({{input.name, scale.symmetric()}}, {"8.5.3"});
  calib8::files::write(out, cache.dump());
  std::cout << feed.count() << " images, " << histogram.total() << " values in ["
            << scale.observed_min << ", " << scale.observed_max << "]: clipped at " << scale.amax
            << "\n";
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5 || std::atoi(argv[3]) < 1) {
    std::cerr << "usage: calibrate_images IMAGES PRESET SIDE OUT.cache\n";
    return 2;
  }
  try {
    calibrate(argv[1], argv[2], std::atoi(argv[3]), argv[4]);
  } catch (const calib8::Error& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
  return 0;
}
