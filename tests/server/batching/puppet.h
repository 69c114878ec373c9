// Tasks that record how they ended, and an executor that a test holds and releases.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "kernels/base/mutex.h"
#include "server/batching/task.h"

namespace awqd::batching {

// The end of every task, in order, as "name:ran" or "name:CODE".
class Journal {
 public:
  void Add(std::string line) {
    MutexLock lock(&mu_);
    lines_.push_back(std::move(line));
  }
  std::vector<std::string> lines() const {
    MutexLock lock(&mu_);
    return lines_;
  }

 private:
  mutable Mutex mu_;
  std::vector<std::string> lines_ ABSL_GUARDED_BY(mu_);
};

class PuppetTask final : public Task {
 public:
  PuppetTask(std::string name, Journal* journal, int64_t tokens = 1, int64_t bytes = 1,
             BatchKey key = {})
      : name_(std::move(name)), journal_(journal), tokens_(tokens), bytes_(bytes), key_(key) {}

  int64_t tokens() const override { return tokens_; }
  int64_t bytes() const override { return bytes_; }
  BatchKey key() const override { return key_; }
  int64_t cost() const override { return cost_; }
  void set_cost(int64_t cost) { cost_ = cost; }
  RunKey run_key() const override { return run_key_; }
  void set_run_key(const RunKey& key) { run_key_ = key; }
  void Fail(const absl::Status& status) override {
    journal_->Add(name_ + ":" + absl::StatusCodeToString(status.code()));
  }
  const std::string& name() const { return name_; }

 private:
  const std::string name_;
  Journal* const journal_;
  int64_t cost_ = 1;
  RunKey run_key_;
  const int64_t tokens_;
  const int64_t bytes_;
  const BatchKey key_;
};

// Runs tasks only while open; counts the batches that wait inside it.
class Gate {
 public:
  void Open() { Set(true); }
  void Close() { Set(false); }
  // The executor calls this; it waits until the gate is open.
  void Pass() {
    MutexLock lock(&mu_);
    ++inside_;
    changed_.NotifyAll();
    changed_.Wait(&mu_, [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return open_; });
    --inside_;
  }
  // Waits until `count` executors wait at the gate.
  void AwaitInside(int count) {
    MutexLock lock(&mu_);
    changed_.Wait(&mu_, [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return inside_ >= count; });
  }

 private:
  void Set(bool open) {
    MutexLock lock(&mu_);
    open_ = open;
    changed_.NotifyAll();
  }
  Mutex mu_;
  CondVar changed_;
  bool open_ ABSL_GUARDED_BY(mu_) = false;
  int inside_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace awqd::batching
