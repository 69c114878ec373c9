// Reassembly: the results of a request's parts, computed by several devices, become its own result.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "kernels/base/mutex.h"
#include "kernels/types.h"
#include "server/engine/engine.h"
#include "server/engine/staging.h"
#include "server/engine/thread_pool.h"

namespace awqd::engine {

// The place of a part that is a block of the result.
struct ResultBlock {
  int64_t row_begin = 0;  // of the result
  int64_t rows = 0;
  int64_t offset = 0;     // in each row of the result, in bytes
  int64_t row_bytes = 0;  // of the part's own rows
};

// Parts that are blocks of a result of rows of `row_bytes`.
std::unique_ptr<Reassembler> ReassembleBlocks(int64_t row_bytes, std::vector<ResultBlock> blocks);

// The places of the rows of each part: row i of part p is row `places[p][i]` of the whole.
using RowPlaces = std::vector<std::vector<int32_t>>;

// Parts whose rows are rows of the result, in any order.
std::unique_ptr<Reassembler> ReassembleRows(int64_t row_bytes, RowPlaces places);

// A reduction of sums v of 32 bits, FP32 or INT32:
//
//   y[i, n] = round(sum over j of weights[i * terms + j] * act(v[i * terms + j, n]))
//
// in the order of j, with the bits of CombineRows (kernels/steps.h). `added` comes last.
struct Reduction {
  int64_t count = 0;  // rows of y
  int64_t cols = 0;
  int64_t terms = 1;
  std::vector<float> weights;  // [count * terms], or empty: all are 1
  ActivationFunction activation = ActivationFunction::kNone;
  DType y_dtype = DType::kFp16;           // INT32: v is INT32 too, and y is v
  Payload added = {};                     // FP32 [count, cols], or nothing
  std::vector<float> added_weights = {};  // [count], or empty: all are 1
};

// Parts whose rows are the v of a Reduction, placed by `places`; each row comes from the part whose
// device has the expert of a token's choice.
std::unique_ptr<Reassembler> ReassembleExpertRows(Reduction reduction, RowPlaces places);

// Parts that are partial sums of every v of a Reduction: v is their sum, in the order of the parts.
std::unique_ptr<Reassembler> ReassemblePartialSums(Reduction reduction, size_t parts);

// One request whose parts several devices compute. Thread-safe. Each part's answer is copied on the
// thread that brings it, so that devices copy side by side; the last part to end answers the
// request.
class PartitionedRequest : public std::enable_shared_from_this<PartitionedRequest> {
 public:
  // `staging` and `pool` outlive the parts. Takes the reassembler of `partition`. `done` is called
  // once, unless Abandon is.
  PartitionedRequest(StagingPool* staging, ThreadPool* pool, WorkPartition* partition,
                     TaskDone done)
      : staging_(staging),
        pool_(pool),
        bytes_(partition->bytes),
        reassembler_(std::move(partition->reassembler)),
        done_(std::move(done)),
        missing_(partition->parts.size()),
        reports_(partition->parts.size()) {}

  // The callback to submit part `part` with.
  TaskDone MakeCallback(size_t part);
  // The part was accepted. Withdraws it at once when the request has failed meanwhile.
  void AddHandle(TaskHandle handle);
  // A part was refused, and with it the request: withdraws the others and never answers.
  void Abandon();
  // Withdraws every part that has not started.
  void Cancel();

 private:
  // Gives a part's rows to the reassembler; allocates the result with the first.
  absl::Status AddRows(size_t part, Payload rows);
  void EndPart(size_t part, absl::Status status, const ExecutionReport& report);
  // The reports of all parts as one: longest times, largest batch, every device and kernel.
  ExecutionReport MergeReports() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  StagingPool* const staging_;
  ThreadPool* const pool_;
  const int64_t bytes_;
  const std::unique_ptr<Reassembler> reassembler_;
  Mutex mu_;
  TaskDone done_ ABSL_GUARDED_BY(mu_);
  absl::Status status_ ABSL_GUARDED_BY(mu_);  // of the first part that failed
  bool withdrawn_ ABSL_GUARDED_BY(mu_) = false;
  size_t missing_ ABSL_GUARDED_BY(mu_);
  Payload result_ ABSL_GUARDED_BY(mu_);
  std::vector<ExecutionReport> reports_ ABSL_GUARDED_BY(mu_);
  std::vector<TaskHandle> handles_ ABSL_GUARDED_BY(mu_);
};

}  // namespace awqd::engine
