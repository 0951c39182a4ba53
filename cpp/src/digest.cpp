#include "calib8/digest.hpp"

#include <openssl/evp.h>

#include <array>

#include "calib8/errors.hpp"
#include "number.hpp"

namespace calib8 {

struct Sha256::State {
  struct Free {
    void operator()(EVP_MD_CTX* context) const { EVP_MD_CTX_free(context); }
  };
  std::unique_ptr<EVP_MD_CTX, Free> context{EVP_MD_CTX_new()};
};

namespace {

void require(int ok) {
  if (ok != 1) throw ConfigError("OpenSSL must offer SHA-256, got an error; use another build");
}

}  // namespace

Sha256::Sha256() : state_(std::make_unique<State>()) {
  require(EVP_DigestInit_ex(state_->context.get(), EVP_sha256(), nullptr));
}

Sha256::~Sha256() = default;
Sha256::Sha256(Sha256&&) noexcept = default;
Sha256& Sha256::operator=(Sha256&&) noexcept = default;

Sha256& Sha256::update(std::string_view bytes) {
  require(EVP_DigestUpdate(state_->context.get(), bytes.data(), bytes.size()));
  return *this;
}

std::string Sha256::bytes() {
  std::array<unsigned char, EVP_MAX_MD_SIZE> raw{};
  unsigned size = 0;
  require(EVP_DigestFinal_ex(state_->context.get(), raw.data(), &size));
  return {raw.begin(), raw.begin() + size};
}

std::string Sha256::hex() {
  std::string text;
  for (const char c : bytes()) text += number::hex(static_cast<unsigned char>(c), 2);
  return text;
}

std::string combine_digests(const std::vector<std::string>& digests) {
  Sha256 combined;
  for (const std::string& part : digests) combined.update(part);
  return combined.hex();
}

}  // namespace calib8
