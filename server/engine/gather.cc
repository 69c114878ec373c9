// Gather: what each part brings, and who answers.
#include <algorithm>
#include <utility>

#include "absl/strings/str_split.h"
#include "kernels/base/status.h"
#include "server/engine/reassembly.h"

namespace awqd::engine {

Gather::Gather(const Helpers& helpers, WorkCut* cut, TaskDone done)
    : helpers_(helpers),
      bytes_(cut->bytes),
      join_(std::move(cut->join)),
      done_(std::move(done)),
      missing_(cut->parts.size()),
      reports_(cut->parts.size()) {}

TaskDone Gather::Part(size_t part) {
  return [self = shared_from_this(), part](const absl::Status& status, Payload rows,
                                           const ExecutionReport& report) {
    self->OnPart(part, status.ok() ? self->Take(part, std::move(rows)) : status, report);
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

absl::Status Gather::Take(size_t part, Payload rows) {
  char* whole;
  {
    MutexLock lock(&mu_);
    if (!status_.ok() || done_ == nullptr) return absl::OkStatus();  // nobody will look at it
    if (result_.data() == nullptr) {
      AWQD_ASSIGN_OR_RETURN(result_, helpers_.staging->Get(bytes_));
    }
    whole = result_.data();
  }
  helpers_.staging->CountCopy(join_->Take(part, std::move(rows), whole));
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
    if (status.ok()) join_->Finish(result.data(), *helpers_.crew);
    done(status, std::move(result), merged);
  } else if (first_failure) {
    Cancel();
  }
}

ExecutionReport Gather::Merged() const {
  ExecutionReport out;
  for (const ExecutionReport& report : reports_) {
    if (report.path == Path::kDequantize) out.path = Path::kDequantize;
    // The links of the batch that the request is said to have been in.
    if (report.batch_requests > out.batch_requests) {
      out.batch_id = report.batch_id;
      out.batch_calls = report.batch_calls;
    }
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
