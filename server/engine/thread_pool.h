// Crew: threads that help a caller with many small things to do, such as the answers of a batch.
#pragma once

#include <cstdint>
#include <list>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "kernels/base/mutex.h"

namespace awqd::engine {

// Thread-safe: several callers share the crew. Who comes first is helped first.
class Crew {
 public:
  // `threads` beside the callers'; 0 is legal.
  explicit Crew(int threads);
  // No call of Share is in progress.
  ~Crew();
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  // Calls body(i) once for every i in [0, count), on this thread and on those of the crew that are
  // free, and returns when all are done. A thread takes `grain` of them at a time; up to that many
  // altogether run on this thread alone. Must not be called from within a body.
  void Share(int64_t count, int64_t grain, absl::FunctionRef<void(int64_t)> body);

 private:
  struct Job {
    const absl::FunctionRef<void(int64_t)> body;
    const int64_t count;
    const int64_t grain;
    int64_t next = 0;  // the first that nobody has taken
    int64_t left;      // not done yet
  };

  void Work();
  // Does the next items of the job, without the lock, and counts them as done.
  void DoShare(Job* job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  Mutex mu_;
  CondVar work_;                               // a job came, or the end
  CondVar done_;                               // the last chunk of a job was done
  std::list<Job*> jobs_ ABSL_GUARDED_BY(mu_);  // with something to take; owned by Share
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace awqd::engine
