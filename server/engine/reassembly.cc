// Copies blocks and rows, reduces sums on the host, and answers when the last part has ended.
#include "server/engine/reassembly.h"

#include <algorithm>
#include <cstring>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_split.h"
#include "kernels/base/half.h"
#include "kernels/base/status.h"
#include "kernels/exact.h"

namespace awqd::engine {
namespace {

// Columns that are summed at a time, so that the sums stay in the first cache.
constexpr int64_t kChunk = 512;
// Sums that a thread takes at a time: some tens of microseconds.
constexpr int64_t kSumsEach = 1 << 15;

// Writes columns [begin, begin + count) of one v to `out`.
using LoadTerm = absl::FunctionRef<void(int64_t term, int64_t begin, int64_t count, float* out)>;

const float* Floats(const Payload& payload) {
  return reinterpret_cast<const float*>(payload.data());
}

void Store(const float* sums, int64_t count, DType dtype, void* y, int64_t at) {
  if (dtype == DType::kFp32) {
    std::memcpy(static_cast<float*>(y) + at, sums, count * sizeof(float));
    return;
  }
  auto* const out = static_cast<uint16_t*>(y) + at;
  if (dtype == DType::kFp16) {
    for (int64_t n = 0; n < count; ++n) out[n] = FloatToHalf(sums[n]);
  } else {
    for (int64_t n = 0; n < count; ++n) out[n] = FloatToBf16(sums[n]);
  }
}

// Computes some columns of a row of y with the bits of CombineRows: a product and a sum, each
// rounded. The first term is not added to 0, which would turn -0 into +0.
void SumRow(const Reduction& reduction, int64_t row, int64_t begin, int64_t count, LoadTerm load,
            void* y) {
  float sums[kChunk], term[kChunk];
  for (int64_t j = 0; j < reduction.terms; ++j) {
    const int64_t at = row * reduction.terms + j;
    load(at, begin, count, term);
    if (reduction.activation != ActivationFunction::kNone) {
      for (int64_t n = 0; n < count; ++n) term[n] = ActivateFloat(reduction.activation, term[n]);
    }
    const float weight = reduction.weights.empty() ? 1.0f : reduction.weights[at];
    if (j == 0) {
      for (int64_t n = 0; n < count; ++n) sums[n] = weight * term[n];
    } else {
      for (int64_t n = 0; n < count; ++n) sums[n] += weight * term[n];
    }
  }
  if (reduction.added.size() > 0) {
    const float* const added = Floats(reduction.added) + row * reduction.cols + begin;
    const float weight = reduction.added_weights.empty() ? 1.0f : reduction.added_weights[row];
    for (int64_t n = 0; n < count; ++n) sums[n] += weight * added[n];
  }
  Store(sums, count, reduction.y_dtype, y, row * reduction.cols + begin);
}

void SumAll(const Reduction& reduction, LoadTerm load, void* y, ThreadPool& pool) {
  if (reduction.cols == 0) return;
  const int64_t grain = std::max<int64_t>(1, kSumsEach / (reduction.cols * reduction.terms));
  pool.ParallelFor(reduction.count, grain, [&](int64_t row) {
    for (int64_t begin = 0; begin < reduction.cols; begin += kChunk) {
      SumRow(reduction, row, begin, std::min(kChunk, reduction.cols - begin), load, y);
    }
  });
}

class BlockReassembler final : public Reassembler {
 public:
  BlockReassembler(int64_t row_bytes, std::vector<ResultBlock> blocks)
      : row_bytes_(row_bytes), blocks_(std::move(blocks)) {}

  int64_t AddPart(size_t part, Payload rows, char* result) override {
    const ResultBlock& block = blocks_[part];
    char* const to = result + block.row_begin * row_bytes_ + block.offset;
    for (int64_t row = 0; row < block.rows; ++row) {
      std::memcpy(to + row * row_bytes_, rows.data() + row * block.row_bytes, block.row_bytes);
    }
    return block.rows * block.row_bytes;
  }

 private:
  const int64_t row_bytes_;
  const std::vector<ResultBlock> blocks_;
};

class RowReassembler final : public Reassembler {
 public:
  RowReassembler(int64_t row_bytes, RowPlaces places)
      : row_bytes_(row_bytes), places_(std::move(places)) {}

  int64_t AddPart(size_t part, Payload rows, char* result) override {
    const char* from = rows.data();
    for (int32_t place : places_[part]) {
      std::memcpy(result + place * row_bytes_, from, row_bytes_);
      from += row_bytes_;
    }
    return from - rows.data();
  }

 private:
  const int64_t row_bytes_;
  const RowPlaces places_;
};

// Keeps the results of the parts until all are there.
class SumReassembler : public Reassembler {
 public:
  SumReassembler(Reduction reduction, size_t parts)
      : reduction_(std::move(reduction)), results_(parts) {}

  int64_t AddPart(size_t part, Payload rows, char* /*result*/) final {
    results_[part] = std::move(rows);
    return 0;
  }

 protected:
  const Reduction reduction_;
  std::vector<Payload> results_;
};

class ExpertReassembler final : public SumReassembler {
 public:
  ExpertReassembler(Reduction reduction, RowPlaces places)
      : SumReassembler(std::move(reduction), places.size()), places_(std::move(places)) {}

  void Finish(char* result, ThreadPool& pool) override {
    std::vector<const float*> rows(reduction_.count * reduction_.terms);
    for (size_t part = 0; part < places_.size(); ++part) {
      const float* from = Floats(results_[part]);
      for (int32_t place : places_[part]) {
        rows[place] = from;
        from += reduction_.cols;
      }
    }
    const auto load = [&](int64_t term, int64_t begin, int64_t count, float* out) {
      std::memcpy(out, rows[term] + begin, count * sizeof(float));
    };
    SumAll(reduction_, load, result, pool);
    results_.clear();
  }

 private:
  const RowPlaces places_;
};

class PartialSumReassembler final : public SumReassembler {
 public:
  using SumReassembler::SumReassembler;

  void Finish(char* result, ThreadPool& pool) override {
    if (reduction_.y_dtype == DType::kInt32) {
      AddIntegers(reinterpret_cast<uint32_t*>(result));
    } else {
      const auto load = [&](int64_t term, int64_t begin, int64_t count, float* out) {
        const int64_t at = term * reduction_.cols + begin;
        std::memcpy(out, Floats(results_[0]) + at, count * sizeof(float));
        for (size_t part = 1; part < results_.size(); ++part) {
          const float* const from = Floats(results_[part]) + at;
          for (int64_t n = 0; n < count; ++n) out[n] += from[n];
        }
      };
      SumAll(reduction_, load, result, pool);
    }
    results_.clear();
  }

 private:
  // The sums are unsigned, so that they may wrap.
  void AddIntegers(uint32_t* sums) const {
    const int64_t count = reduction_.count * reduction_.terms * reduction_.cols;
    for (size_t part = 0; part < results_.size(); ++part) {
      const auto* const from = reinterpret_cast<const uint32_t*>(results_[part].data());
      for (int64_t i = 0; i < count; ++i) sums[i] = part == 0 ? from[i] : sums[i] + from[i];
    }
  }
};

}  // namespace

std::unique_ptr<Reassembler> ReassembleBlocks(int64_t row_bytes, std::vector<ResultBlock> blocks) {
  return std::make_unique<BlockReassembler>(row_bytes, std::move(blocks));
}

std::unique_ptr<Reassembler> ReassembleRows(int64_t row_bytes, RowPlaces places) {
  return std::make_unique<RowReassembler>(row_bytes, std::move(places));
}

std::unique_ptr<Reassembler> ReassembleExpertRows(Reduction reduction, RowPlaces places) {
  return std::make_unique<ExpertReassembler>(std::move(reduction), std::move(places));
}

std::unique_ptr<Reassembler> ReassemblePartialSums(Reduction reduction, size_t parts) {
  return std::make_unique<PartialSumReassembler>(std::move(reduction), parts);
}

TaskDone PartitionedRequest::MakeCallback(size_t part) {
  return [self = shared_from_this(), part](const absl::Status& status, Payload rows,
                                           const ExecutionReport& report) {
    self->EndPart(part, status.ok() ? self->AddRows(part, std::move(rows)) : status, report);
  };
}

void PartitionedRequest::AddHandle(TaskHandle handle) {
  {
    MutexLock lock(&mu_);
    if (!withdrawn_) {
      handles_.push_back(std::move(handle));
      return;
    }
  }
  handle.Cancel();
}

void PartitionedRequest::Abandon() {
  {
    MutexLock lock(&mu_);
    done_ = nullptr;
  }
  Cancel();
}

void PartitionedRequest::Cancel() {
  std::vector<TaskHandle> handles;
  {
    MutexLock lock(&mu_);
    withdrawn_ = true;
    handles = std::exchange(handles_, {});
  }
  for (const TaskHandle& handle : handles) handle.Cancel();  // answers parts, which takes the lock
}

absl::Status PartitionedRequest::AddRows(size_t part, Payload rows) {
  char* whole;
  {
    MutexLock lock(&mu_);
    if (!status_.ok() || done_ == nullptr) return absl::OkStatus();  // nobody will look at it
    if (result_.data() == nullptr) {
      AWQD_ASSIGN_OR_RETURN(result_, staging_->Get(bytes_));
    }
    whole = result_.data();
  }
  staging_->CountCopy(reassembler_->AddPart(part, std::move(rows), whole));
  return absl::OkStatus();
}

void PartitionedRequest::EndPart(size_t part, absl::Status status, const ExecutionReport& report) {
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
      merged = MergeReports();
    }
  }
  if (done) {
    if (status.ok()) reassembler_->Finish(result.data(), *pool_);
    done(status, std::move(result), merged);
  } else if (first_failure) {
    Cancel();
  }
}

ExecutionReport PartitionedRequest::MergeReports() const {
  ExecutionReport out;
  for (const ExecutionReport& report : reports_) {
    if (report.path == Path::kDequantize) out.path = Path::kDequantize;
    // The request reports the largest of the batches, with its links.
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
