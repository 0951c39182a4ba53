#include <atomic>
#include <chrono>
#include <set>
#include <stdexcept>

#include "calib8/stream.hpp"
#include "catch.hpp"

using calib8::Stream;

namespace {

void count_to(const Stream<int>::Put& put, int end, std::atomic<int>* produced = nullptr) {
  for (int k = 0; k < end; ++k) {
    if (produced != nullptr) produced->store(k + 1);
    if (!put(k)) return;
  }
}

}  // namespace

TEST_CASE("several workers share one stream and miss nothing") {
  Stream<int> stream([](const auto& put) { count_to(put, 2000); });
  std::mutex mutex;
  std::multiset<int> consumed;
  std::vector<std::thread> workers;
  for (int k = 0; k < 4; ++k) {
    workers.emplace_back([&] {
      while (const std::optional<int> item = stream.next()) {
        const std::lock_guard lock(mutex);
        consumed.insert(*item);
      }
    });
  }
  for (std::thread& worker : workers) worker.join();
  CHECK(consumed.size() == 2000);
  CHECK(std::set<int>(consumed.begin(), consumed.end()).size() == 2000);
}

TEST_CASE("an exception crosses over after the good items, once") {
  Stream<int> stream([](const auto& put) {
    put(1);
    throw std::runtime_error("bad image");
  });
  CHECK(stream.next() == 1);
  CHECK_THROWS_WITH(stream.next(), "bad image");
  CHECK_FALSE(stream.next());
}

TEST_CASE("a queue of no depth holds one") {
  Stream<int> stream([](const auto& put) { count_to(put, 3, nullptr); }, 0);
  CHECK(stream.next() == 0);
  CHECK(stream.next() == 1);
}

TEST_CASE("leaving early joins the thread, and the queue is bounded") {
  std::atomic<int> produced{0};
  {
    Stream<int> stream([&produced](const auto& put) { count_to(put, 1000000, &produced); }, 3);
    CHECK(stream.next() == 0);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    CHECK(produced <= 6);
    stream.close();
    CHECK_FALSE(stream.next());
  }
  CHECK(produced <= 6);
}
