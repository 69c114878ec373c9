// LogLimit: how often lines of one kind are logged, where clients decide how often they come.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kernels/base/mutex.h"

namespace awqd::obs {

// Thread-safe.
class LogLimit {
 public:
  // At most `lines` in `window` with one key, and at most `keys` keys at a time; those that come
  // when there are as many share one.
  LogLimit(int64_t lines, absl::Duration window, size_t keys);

  struct Verdict {
    bool log = false;
    // Lines with this key that were left out since the last one that was logged.
    int64_t left_out = 0;
  };
  Verdict Ask(absl::string_view key, absl::Time now);

 private:
  struct Window {
    absl::Time begin;
    int64_t lines = 0;
    int64_t left_out = 0;
  };
  // Forgets what is over and has nothing to report.
  void Forget(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const int64_t lines_;
  const absl::Duration window_;
  const size_t keys_;
  Mutex mu_;
  std::map<std::string, Window, std::less<>> windows_ ABSL_GUARDED_BY(mu_);
};

}  // namespace awqd::obs
