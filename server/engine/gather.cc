// Gather: the strided copy of each part, and who answers.
#include "server/engine/gather.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_split.h"
#include "kernels/base/status.h"

namespace awqd::engine {

Gather::Gather(StagingPool* staging, const WorkCut& cut, TaskDone done)
    : staging_(staging),
      rows_(cut.rows),
      row_bytes_(cut.row_bytes),
      done_(std::move(done)),
      missing_(cut.parts.size()),
      reports_(cut.parts.size()) {}

TaskDone Gather::Part(size_t index, const WorkPart& part) {
  return [self = shared_from_this(), index, offset = part.offset, width = part.row_bytes](
             const absl::Status& status, const Payload& rows, const ExecutionReport& report) {
    self->OnPart(index, status.ok() ? self->Place(rows, offset, width) : status, report);
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
  for (const ExecutionReport& report : reports_) {
    if (report.path == Path::kDequantize) out.path = Path::kDequantize;
    out.batch_tokens = std::max(out.batch_tokens, report.batch_tokens);
    out.batch_requests = std::max(out.batch_requests, report.batch_requests);
    out.queue_us = std::max(out.queue_us, report.queue_us);
    out.compute_us = std::max(out.compute_us, report.compute_us);
    for (absl::string_view name : absl::StrSplit(report.kernel, ',')) AddName(name, &out.kernel);
    AddName(report.device, &out.device);
  }
  return out;
}

}  // namespace awqd::engine
