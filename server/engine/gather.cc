// Gather: the strided copy of each part, and who answers.
#include "server/engine/gather.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_join.h"
#include "kernels/base/status.h"

namespace awqd {
namespace {

void AddName(const std::string& name, std::vector<std::string>* names) {
  const bool known = std::find(names->begin(), names->end(), name) != names->end();
  if (!name.empty() && !known) names->push_back(name);
}

}  // namespace

Gather::Gather(StagingPool* staging, int64_t rows, int64_t row_bytes, size_t parts, TaskDone done)
    : staging_(staging),
      rows_(rows),
      row_bytes_(row_bytes),
      done_(std::move(done)),
      missing_(parts),
      reports_(parts) {}

TaskDone Gather::Part(size_t part, int64_t offset, int64_t width) {
  return [self = shared_from_this(), part, offset, width](const absl::Status& status, Payload rows,
                                                          const ExecutionReport& report) {
    self->OnPart(part, status.ok() ? self->Place(rows, offset, width) : status, report);
  };
}

void Gather::Accepted(TaskHandle handle) {
  {
    MutexLock lock(&mu_);
    if (!withdrawn_) {
      handles_.push_back(std::move(handle));
      return;
    }
  }
  handle.Cancel();
}

void Gather::Abandon() {
  {
    MutexLock lock(&mu_);
    done_ = nullptr;
  }
  Cancel();
}

void Gather::Cancel() {
  std::vector<TaskHandle> handles;
  {
    MutexLock lock(&mu_);
    withdrawn_ = true;
    handles = std::exchange(handles_, {});
  }
  for (const TaskHandle& handle : handles) handle.Cancel();  // answers parts, which takes the lock
}

absl::Status Gather::Place(const Payload& from, int64_t offset, int64_t width) {
  char* to;
  {
    MutexLock lock(&mu_);
    if (!status_.ok() || done_ == nullptr) return absl::OkStatus();  // nobody will look at it
    if (result_.data() == nullptr) {
      AWQD_ASSIGN_OR_RETURN(result_, staging_->Get(rows_ * row_bytes_));
    }
    to = result_.data() + offset;
  }
  for (int64_t row = 0; row < rows_; ++row) {
    std::memcpy(to + row * row_bytes_, from.data() + row * width, width);
  }
  staging_->CountCopy(rows_ * width);
  return absl::OkStatus();
}

void Gather::OnPart(size_t part, absl::Status status, const ExecutionReport& report) {
  TaskDone done;
  Payload result;
  ExecutionReport merged;
  bool first_failure = false;
  {
    MutexLock lock(&mu_);
    first_failure = !status.ok() && status_.ok();
    if (first_failure) status_ = std::move(status);
    reports_[part] = report;
    if (--missing_ == 0) {
      done = std::exchange(done_, nullptr);
      status = status_;
      if (status.ok()) result = std::move(result_);
      result_ = Payload();
      merged = Merged();
    }
  }
  if (done) {
    done(status, std::move(result), merged);
  } else if (first_failure) {
    Cancel();
  }
}

ExecutionReport Gather::Merged() const {
  ExecutionReport out;
  std::vector<std::string> kernels, devices;
  for (const ExecutionReport& report : reports_) {
    if (report.path == Path::kDequantize) out.path = Path::kDequantize;
    out.batch_tokens = std::max(out.batch_tokens, report.batch_tokens);
    out.batch_requests = std::max(out.batch_requests, report.batch_requests);
    out.queue_us = std::max(out.queue_us, report.queue_us);
    out.compute_us = std::max(out.compute_us, report.compute_us);
    AddName(report.kernel, &kernels);
    AddName(report.device, &devices);
  }
  out.kernel = absl::StrJoin(kernels, ",");
  out.device = absl::StrJoin(devices, ",");
  return out;
}

}  // namespace awqd
