// HttpConnections: which connections an HTTP server has, and which of them must go.
//
// A client can be slow on purpose, and a probe that finds no place makes an orchestrator kill the
// server. So each connection has a time for its whole request and one for its whole answer, and a
// new one always finds a place: it takes that of the oldest, of the peer that has most.
#pragma once

#include <chrono>
#include <list>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "kernels/base/mutex.h"

namespace awqd::obs {

struct HttpLimits {
  int connections = 48;
  int connections_per_peer = 16;  // of an address, or of a network as Origin says
  absl::Duration request_time = absl::Seconds(5);
  absl::Duration answer_time = absl::Seconds(10);
};

// Thread-safe. Somebody else owns the descriptors: this shuts them down, and their owner then
// closes them. A thread of its own keeps the time.
class HttpConnections {
 public:
  class Entry {
   private:
    friend class HttpConnections;
    int fd = -1;
    std::string peer;
    std::chrono::steady_clock::time_point until;
    bool ended = false;  // shut down, and not closed yet
    std::list<Entry>::iterator self;
  };

  explicit HttpConnections(const HttpLimits& limits);
  ~HttpConnections();
  HttpConnections(const HttpConnections&) = delete;
  HttpConnections& operator=(const HttpConnections&) = delete;

  // Called once the owner has accepted `fd`. The entry lives until Closed.
  Entry* Opened(int fd);
  // The request is there, and the answer is sent next.
  void Answers(Entry* entry);
  // Called before the owner closes the descriptor.
  void Closed(Entry* entry);

 private:
  void Run();
  void End(Entry& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  int CountOf(const std::string& peer) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void EndOldestOf(const std::string& peer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void EndOldestOfMost() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const HttpLimits limits_;
  Mutex mu_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::list<Entry> entries_ ABSL_GUARDED_BY(mu_);  // in the order they came
  int open_ ABSL_GUARDED_BY(mu_) = 0;              // entries that have not ended
  std::thread thread_;
};

}  // namespace awqd::obs
