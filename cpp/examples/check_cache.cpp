// Checks a calibration cache against the model that it is to build, and labels it for another TensorRT.
// It needs neither images nor OpenCV nor TensorRT:
//
//   check_cache model.cache model.onnx                     who made it, and whether it fits
//   check_cache model.cache model.onnx 10.3.0 out.cache    the same scales, for TensorRT 10.3.0
//
// model.cache.json, the fingerprint that calib8 writes beside a cache, must lie next to it.
#include <calib8/cache.hpp>
#include <calib8/errors.hpp>
#include <calib8/files.hpp>
#include <calib8/fingerprint.hpp>
#include <calib8/model_identity.hpp>
#include <iostream>

namespace {

// Prints who made the cache, and the scales that a Q/DQ node could not use; throws if it is of another model.
calib8::CalibrationCache check(const std::string& cache_path, const std::string& model) {
  const calib8::StoredCache stored = calib8::read_stored_cache(cache_path);
  calib8::Fingerprint current = stored.fingerprint;
  current.model = calib8::identity_of(model);
  const std::string mismatch = calib8::describe_mismatch(stored, current);
  if (!mismatch.empty()) throw calib8::CacheError(cache_path + " does not fit: " + mismatch);

  const calib8::CalibrationCache cache = calib8::parse_cache(stored.text, cache_path);
  std::cout << stored.fingerprint.maker() << ", " << cache.entries.size() << " scales, "
            << cache.header.text << "\n";
  for (const calib8::Entry& entry : cache.entries) {
    const auto flaw = entry.flaw();
    if (flaw) std::cout << entry.name << ": " << *flaw << "\n";
  }
  return cache;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3 && argc != 5) {
    std::cerr << "usage: check_cache CACHE MODEL.onnx [X.Y.Z OUT.cache]\n";
    return 2;
  }
  try {
    const calib8::CalibrationCache cache = check(argv[1], argv[2]);
    if (argc == 5) calib8::files::write(argv[4], calib8::relabel(cache, argv[3]).dump());
  } catch (const calib8::Error& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
  return 0;
}
