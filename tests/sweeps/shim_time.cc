// A time of day that jumps, and threads that are starved. Waits until a time of day must see the
// jump too, as in the kernel: they run in short pieces, and may end early.
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdarg.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>

#include "tests/sweeps/shim.h"

namespace awqd::sweeps {

bool OpenAt2Fails(int directory);

namespace {

constexpr int64_t kSecond = 1'000'000'000;
constexpr int64_t kPiece = kSecond / 20;

int64_t Shift() { return TheControl() == nullptr ? 0 : TheControl()->clock_shift_ns.load(); }
int64_t InNs(const timespec& time) { return time.tv_sec * kSecond + time.tv_nsec; }
timespec InParts(int64_t ns) { return {ns / kSecond, ns % kSecond}; }

int64_t RealNow() {
  static const auto real = Next<int(clockid_t, timespec*)>("clock_gettime");
  timespec now = {};
  real(CLOCK_REALTIME, &now);
  return InNs(now);
}

// The end, in the kernel's time, of a piece of a wait until `until` in the server's time of day.
timespec EndOfPiece(const timespec& until) {
  return InParts(std::max<int64_t>(0, std::min(InNs(until) - Shift(), RealNow() + kPiece)));
}
bool IsOver(const timespec& until) { return RealNow() + Shift() >= InNs(until); }

}  // namespace
}  // namespace awqd::sweeps

using awqd::sweeps::EndOfPiece;
using awqd::sweeps::IsOver;
using awqd::sweeps::MaybeStall;
using awqd::sweeps::Next;
using awqd::sweeps::TheControl;

extern "C" {

int clock_gettime(clockid_t clock, timespec* out) noexcept {
  static const auto real = Next<int(clockid_t, timespec*)>("clock_gettime");
  MaybeStall();
  const int result = real(clock, out);
  if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) {
    *out = awqd::sweeps::InParts(awqd::sweeps::InNs(*out) + awqd::sweeps::Shift());
  }
  return result;
}

int gettimeofday(timeval* out, void*) noexcept {
  const int64_t now = awqd::sweeps::RealNow() + awqd::sweeps::Shift();
  *out = {now / awqd::sweeps::kSecond, now % awqd::sweeps::kSecond / 1000};
  return 0;
}

time_t time(time_t* out) noexcept {
  const time_t now = (awqd::sweeps::RealNow() + awqd::sweeps::Shift()) / awqd::sweeps::kSecond;
  if (out != nullptr) *out = now;
  return now;
}

int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const timespec* until) {
  static const auto real = Next<int(pthread_cond_t*, pthread_mutex_t*, clockid_t, const timespec*)>(
      "pthread_cond_clockwait");
  if (TheControl() == nullptr || clock != CLOCK_REALTIME) {
    return real(condition, mutex, clock, until);
  }
  const timespec piece = EndOfPiece(*until);
  const int result = real(condition, mutex, clock, &piece);
  return result == ETIMEDOUT && !IsOver(*until) ? 0 : result;
}

int pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex,
                           const timespec* until) {
  return pthread_cond_clockwait(condition, mutex, CLOCK_REALTIME, until);
}

long syscall(long number, ...) noexcept {
  static const auto real = Next<long(long, ...)>("syscall");
  va_list more;
  va_start(more, number);
  long a[6];
  for (long& argument : a) argument = va_arg(more, long);
  va_end(more);
  if (number == SYS_openat2 && awqd::sweeps::OpenAt2Fails(static_cast<int>(a[0]))) return -1;
  constexpr int kUntilTimeOfDay = FUTEX_WAIT_BITSET | FUTEX_CLOCK_REALTIME;
  const bool waits = number == SYS_futex && (a[1] & ~FUTEX_PRIVATE_FLAG) == kUntilTimeOfDay;
  if (number == SYS_futex) MaybeStall();
  if (!waits || a[3] == 0 || TheControl() == nullptr) {
    return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
  }
  const timespec until = *reinterpret_cast<const timespec*>(a[3]);
  const timespec piece = EndOfPiece(until);
  const long result = real(number, a[0], a[1], a[2], &piece, a[4], a[5]);
  return result == -1 && errno == ETIMEDOUT && !IsOver(until) ? 0 : result;
}

}  // extern "C"
