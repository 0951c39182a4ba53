// Digests of files and of feeds; deploy/feed/file_list.py.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "calib8/export.hpp"

CALIB8_EXPORT_BEGIN
namespace calib8 {

// Streaming SHA-256.
class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(Sha256&&) noexcept;
  Sha256& operator=(Sha256&&) noexcept;

  Sha256& update(std::string_view bytes);
  std::string bytes();  // 32 bytes; ends the digest
  std::string hex();    // the same as 64 lower-case digits

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// The sha256 (64 digits) of the digests in their order.
std::string combine_digests(const std::vector<std::string>& digests);

}  // namespace calib8
CALIB8_EXPORT_END
