// Progress: what a load says of itself while it runs.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace awqd::model {

// Takes one line without a line feed. Called on a thread of the load, by one at a time.
using ProgressLog = std::function<void(absl::string_view)>;

// The present; a parameter so that tests need not wait.
using NowFunction = std::function<absl::Time()>;

// Who is told. Each may be empty.
struct ProgressSinks {
  ProgressLog log;  // lines
  ProgressLog bar;  // the text of one line that is replaced by the next; "" at the end
  std::atomic<float>* share = nullptr;            // of the bytes, from 0 to 1
  std::atomic<int64_t>* planned_bytes = nullptr;  // what the load will take of all devices
};

// What others may ask of a load in progress, and tell it.
struct LoadState {
  std::atomic<float> share{0.0f};
  std::atomic<int64_t> planned_bytes{0};  // 0 until it is planned
  bool for_client = true;                 // a client asked for it; set before others see it
  std::atomic<bool> unwanted{false};      // a client unloads meanwhile what the server loads
  std::atomic<bool> served{false};        // it has ended well
  std::string files;                      // FolderState's, at its begin; the loading thread's
};

// A line at most every two seconds, none for a load that ends before; or, where there is a bar, its
// text at once and then at most every 100 ms, instead of lines. The share after every weight. Used
// by one thread at a time.
class Progress {
 public:
  static constexpr absl::Duration kInterval = absl::Seconds(2);
  static constexpr absl::Duration kBarInterval = absl::Milliseconds(100);

  Progress(std::string model, int64_t total_bytes, int64_t total_weights, ProgressSinks sinks,
           NowFunction now);
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress();

  // One more weight of `bytes` is on the device.
  void Add(int64_t bytes);

  absl::Duration elapsed() const { return now_() - start_; }

 private:
  // From 0 to 1.
  double Share() const;
  // "40 of 100 MiB"
  std::string Amount() const;
  double MibPerSecond() const;
  std::string Line() const;
  std::string Bar() const;

  const std::string model_;
  const int64_t total_bytes_;
  const int64_t total_weights_;
  const ProgressSinks sinks_;
  const NowFunction now_;
  const absl::Time start_;
  absl::Time last_;
  int64_t bytes_ = 0;
  int64_t weights_ = 0;
};

}  // namespace awqd::model
