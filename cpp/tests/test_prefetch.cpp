#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>

#include "catch.hpp"
#include "machine.hpp"
#include "prefetch.hpp"

using calib8::Prefetcher;

namespace {

// Until it holds, at most ten seconds.
template <class Holds>
bool eventually(const Holds& holds) {
  for (int k = 0; k < 10000; ++k) {
    if (holds()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

}  // namespace

TEST_CASE("what several threads make is taken in order, round after round") {
  for (const std::size_t threads : {1U, 2U, 5U, 16U}) {
    for (std::size_t count = 0; count < 60; ++count) {
      std::atomic<std::size_t> started{0};
      {
        const auto work = [&started](std::size_t index) {
          if (index % 7 == 0) std::this_thread::yield();
          ++started;
          return std::to_string(index);
        };
        Prefetcher<std::string> prefetcher(work, count, threads);
        for (std::size_t k = 0; k < count; ++k) REQUIRE(prefetcher.take() == std::to_string(k));
      }
      REQUIRE(started == count);
    }
  }
}

TEST_CASE("work is done by as many threads as were asked for, beside each other") {
  std::atomic<int> active{0};
  Prefetcher<bool> prefetcher(
      [&active](std::size_t) {
        ++active;
        return eventually([&active] { return active >= 3; });
      },
      3, 3);
  for (int k = 0; k < 3; ++k) CHECK(prefetcher.take());
}

TEST_CASE("the first error in order is met first, and later ones wait for their turn") {
  for (int round = 0; round < 50; ++round) {
    std::atomic<bool> is_failed{false};
    Prefetcher<int> prefetcher(
        [&is_failed](std::size_t index) {
          if (index == 3) {
            is_failed = true;
            throw std::runtime_error("3");
          }
          if (index == 2) {  // in any case after the third
            eventually([&is_failed] { return is_failed.load(); });
            throw std::logic_error("2");
          }
          return static_cast<int>(index);
        },
        8, 4);
    CHECK(prefetcher.take() == 0);
    CHECK(prefetcher.take() == 1);
    CHECK_THROWS_WITH(prefetcher.take(), "2");
    CHECK_THROWS_WITH(prefetcher.take(), "3");
    for (int k = 4; k < 8; ++k) CHECK(prefetcher.take() == k);
  }
}

TEST_CASE("two results a thread are made ahead and no more, and leaving early ends the threads") {
  std::atomic<std::size_t> started{0};
  {
    Prefetcher<std::size_t> prefetcher([&started](std::size_t) { return ++started; }, 1000000, 3);
    REQUIRE(eventually([&started] { return started == 6; }));
    for (int k = 0; k < 4; ++k) prefetcher.take();
    REQUIRE(eventually([&started] { return started == 10; }));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  CHECK(started == 10);
  for (int round = 0; round < 200; ++round) {
    const Prefetcher<std::size_t> left([&started](std::size_t) { return ++started; }, 1000000, 4);
  }
  CHECK(started <= 10 + 200 * 8);
}

TEST_CASE("one thread works as it is asked to") {
  std::size_t started = 0;  // by this thread alone
  Prefetcher<std::size_t> prefetcher([&started](std::size_t) { return ++started; }, 10, 1);
  CHECK(prefetcher.take() == 1);
  CHECK(started == 1);
}

#ifdef __linux__
TEST_CASE("unless told, there is one thread a core that may be used, and at most four") {
  cpu_set_t previous;
  REQUIRE(::sched_getaffinity(0, sizeof previous, &previous) == 0);
  CHECK(calib8::default_threads() == std::min(4, CPU_COUNT(&previous)));
  int core = 0;
  while (!CPU_ISSET(core, &previous)) ++core;
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(core, &one);
  REQUIRE(::sched_setaffinity(0, sizeof one, &one) == 0);
  CHECK(calib8::default_threads() == 1);
  REQUIRE(::sched_setaffinity(0, sizeof previous, &previous) == 0);
}
#endif
