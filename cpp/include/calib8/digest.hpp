// Digests that say whether two feeds are the same, without decoding anything; deploy/feed/manifest.py.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace calib8 {

// Streaming SHA-256.
class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(Sha256&&) noexcept;
  Sha256& operator=(Sha256&&) noexcept;

  Sha256& update(std::string_view bytes);
  std::string hex();  // 64 lower-case digits; ends the digest

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// sha256 over the names in their order, each ended by a zero byte.
std::string names_digest(const std::vector<std::string>& names);

// Adds one file to a digest over (name, length, content).
void add_file(Sha256& digest, std::string_view name, std::string_view content);

}  // namespace calib8
