// Work: what a request asks of a device. One interface for every operation.
//
// An operation is a subclass in two files of its own. The scheduler, the engines and the lane know
// this interface alone. README.md has the recipe for a new one.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/types.h"
#include "server/batching/task.h"
#include "server/engine/staging.h"
#include "server/model/placed_weight.h"
#include "server/obs/trace_context.h"

namespace awqd {
struct KernelRow;
}

namespace awqd::engine {

class Lane;
class ThreadPool;
class Work;
struct Reduction;

// Describes the run of a request, for the response's Execution.
struct ExecutionReport {
  Path path = Path::kFused;  // kDequantize if any product was decoded first
  std::string kernel;        // names of all kernels that ran, "a,b"
  std::string device;
  int64_t batch_id = 0;  // from 1 on, of the process; 0: no batch ran
  int64_t batch_tokens = 0;
  int32_t batch_requests = 0;
  // Only for a traced work: the traced calls whose works were in its batch, each once; its own may
  // be among them. At most obs::kMaxLinks + 1.
  obs::SpanRefs batch_calls;
  int64_t queue_us = 0;
  int64_t compute_us = 0;
  int64_t input_ns = 0;  // the part of it until payloads were on the device, or on their way there
};

// A cost of so many multiplications.
int64_t CostOfMultiplications(double multiplications);

// Appends `name` to a list "a,b", unless it is empty or there already.
void AddName(absl::string_view name, std::string* list);

// Called exactly once per accepted work. `result` holds the result, row-major little-endian, when
// the status is OK; results of one batch share a buffer.
using TaskDone =
    std::function<void(const absl::Status& status, Payload result, const ExecutionReport& report)>;

// Puts the results of parts together. Threads that bring results call it; its scheme of the
// parts does not change.
class Reassembler {
 public:
  virtual ~Reassembler() = default;

  // Part `part` has ended with `rows`. Called once for each part, perhaps at the same time for
  // several. Returns how many bytes it copied to `result`, the memory of the whole.
  virtual int64_t AddPart(size_t part, Payload rows, char* result) = 0;

  // Every part has ended. Long work is shared with the threads of `pool`.
  virtual void Finish(char* /*result*/, ThreadPool& /*pool*/) {}
};

// A work partitioned among devices: one part for each, and how their results become the whole one.
struct WorkPartition {
  absl::InlinedVector<std::unique_ptr<Work>, 8> parts;
  int64_t bytes = 0;                         // of the whole result
  std::unique_ptr<Reassembler> reassembler;  // null: there is one part; its result is the whole one
  // Not null: the result is not the request's, but what this partitions a further stage of it from.
  std::function<absl::StatusOr<WorkPartition>(Payload result)> next;
};

// A result of `rows` rows of the columns `wanted` of `weight`, `element_bytes` each.
struct ColumnResult {
  const model::PlacedWeight& weight;
  model::ColumnSpan wanted;
  int64_t rows = 0;
  int64_t element_bytes = 0;
};

// Partitions such a result by columns (tensor parallel): one part for each part of the weight that
// holds wanted columns; `make` makes the work that computes `columns` (of the whole weight) there.
// No column at all is one part of no columns.
WorkPartition PartitionColumns(
    const ColumnResult& result,
    absl::FunctionRef<std::unique_ptr<Work>(size_t part, model::ColumnSpan columns)> make);

// Partitions a work into `parts` works that each compute partial sums of all of the result (tensor
// parallel at the rows of a weight). `make` makes part `part`.
absl::StatusOr<WorkPartition> PartitionPartialSums(
    const Reduction& reduction, size_t parts,
    absl::FunctionRef<absl::StatusOr<std::unique_ptr<Work>>(size_t part)> make);

// Activations of `rows` tokens.
struct Activations {
  const Payload& x;
  DType dtype = DType::kFp16;
  int64_t rows = 0;
};

// Copies the columns of x that the rows of a part of a weight multiply.
absl::StatusOr<Payload> CopyColumns(const Activations& activations, const model::WeightPart& part,
                                    StagingPool& staging);

// One request. The caller that fills the fields validates them. Task has what batching needs:
// tokens, bytes held while queued, cost in multiplications.
class Work : public batching::Task {
 public:
  // The operation, as its RPC is called. For messages.
  virtual absl::string_view name() const = 0;

  // The weights it reads. Part `part` of each is on the device that runs the work. A work without
  // weights runs on any device; `part` is then the number of the device among its engine's.
  virtual absl::Span<const std::shared_ptr<const model::PlacedWeight>> weights() const = 0;
  size_t part = 0;

  virtual int64_t result_bytes() const = 0;

  // Memory of a device that the result goes to, of result_bytes(); else it goes to staging memory.
  // For a work that accesses_devices().
  Payload output;
  // Whether activations and the result may be memory of devices: no step of the work reads or
  // writes them on the host.
  virtual bool accesses_devices() const { return false; }
  // Called before the first step that reads memory of the caller, and after the last one of the
  // batch, if that is given.
  std::shared_ptr<SharedEvent> ready, finished;
  // The same of points of this process: `marks` is recorded for a later work, which `waits_for` it.
  std::shared_ptr<StreamPoint> waits_for, marks;
  // With `output`: it may be answered once its kernels are enqueued.
  bool early = false;

  // Works of the same class with equal keys may run as one batch. A null subject never merges.
  virtual batching::BatchKey merge_key() const { return {}; }

  // Whether no device has all that it needs, so that it must be partitioned: by default, whether
  // one of its weights is.
  virtual bool partitioned() const;

  // Makes the parts of a partitioned() work, one for each device that holds some of what it needs.
  // Called once; the work itself is not run. `staging`: for activations that parts do not share.
  // UNIMPLEMENTED when the operation needs whole weights, which is the default.
  virtual absl::StatusOr<WorkPartition> Partition(StagingPool& staging) const;

  // Runs the batch, whose first task this work is, and waits for the device. All tasks are of this
  // class and have its key. `result` is staging memory for the results of all, one after the other.
  // Adds what ran to `report` (AddKernel).
  virtual absl::Status Run(Lane& lane, const batching::Batch& batch, char* result,
                           ExecutionReport* report) const = 0;

  // Frees the request's own data. Called before the answer, so that a client that has the answer
  // finds that memory free.
  virtual void FreeInputs() {}

  // The device that a work with weights runs on.
  const Device* device() const { return weights().front()->parts[part].weight->device; }

  batching::BatchKey key() const final;
  // The operation and the shape of its first weight.
  batching::RunKey run_key() const final;
  void Fail(const absl::Status& status) final { done(status, Payload(), ExecutionReport()); }
  void Complete(const absl::Status& status, Payload result, const ExecutionReport& report) {
    FreeInputs();
    done(status, std::move(result), report);
  }

  // Set by the engine that accepts the work.
  TaskDone done;
  obs::SpanRef call;
};

// Adds what a later stage of the same request reports: names and times.
void AddStage(const ExecutionReport& later, ExecutionReport* report);

// Adds a kernel that ran. Null: none did.
void AddKernel(const KernelRow* row, ExecutionReport* report);

}  // namespace awqd::engine
