// RoutingEngine: which devices a request runs on, and how it is cut among them.
#include "server/engine/routing_engine.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "kernels/base/status.h"
#include "server/engine/gather.h"

namespace awqd {
namespace {

// A device's engine, with what it still has to do. A request outlives neither.
struct Member {
  std::atomic<int64_t> outstanding{0};  // tokens queued and running
  std::unique_ptr<Engine> engine;
};

// Rows of the answer: a row costs about as much to decode as to multiply.
int64_t RowsOf(const MatmulWork& work) { return work.tokens; }
int64_t RowsOf(const DequantizeWork& work) { return work.rows; }

// Columns of the answer, as columns of the whole weight.
ColumnSpan ColumnsOf(const MatmulWork& work) { return {0, work.weight->shape.n}; }
ColumnSpan ColumnsOf(const DequantizeWork& work) {
  return {work.col_begin, work.col_begin + work.cols};
}

// What a part has to do for these columns of the whole weight, all of which it holds.
MatmulWork Narrowed(MatmulWork work, size_t part, ColumnSpan columns) {
  work.part = part;
  if (!work.bias.empty()) {
    work.bias = {work.bias.begin() + columns.begin, work.bias.begin() + columns.end};
  }
  return work;
}
DequantizeWork Narrowed(DequantizeWork work, size_t part, ColumnSpan columns) {
  work.part = part;
  work.col_begin = columns.begin - work.weight->parts[part].col_begin;
  work.cols = columns.end - columns.begin;
  return work;
}

// A part of a weight and the columns of it that a request wants.
struct Share {
  size_t part = 0;
  ColumnSpan columns;
};
using Shares = absl::InlinedVector<Share, 8>;

Shares SharesOf(const PlacedWeight& weight, ColumnSpan wanted) {
  Shares out;
  for (size_t i = 0; i < weight.parts.size(); ++i) {
    const WeightPart& part = weight.parts[i];
    const ColumnSpan columns = {std::max(wanted.begin, part.col_begin),
                                std::min(wanted.end, part.col_end())};
    if (columns.begin < columns.end) out.push_back({i, columns});
  }
  // No columns at all still get an answer.
  if (out.empty()) out.push_back({0, {0, 0}});
  return out;
}

// Another replica may have room, or life, where this one has not.
bool MayFitElsewhere(const absl::Status& status) {
  return absl::IsResourceExhausted(status) || absl::IsFailedPrecondition(status);
}

class RoutingEngine final : public Engine {
 public:
  explicit RoutingEngine(std::vector<std::unique_ptr<Engine>> engines) {
    for (std::unique_ptr<Engine>& engine : engines) {
      members_.push_back(std::make_unique<Member>());
      members_.back()->engine = std::move(engine);
    }
  }
  // One engine's parts use another's staging memory, so all end before any of them goes.
  ~RoutingEngine() override { Drain(); }

  absl::StatusOr<TaskHandle> Submit(MatmulWork work, const SubmitOptions& options,
                                    TaskDone done) override {
    return Route(std::move(work), options, std::move(done));
  }
  absl::StatusOr<TaskHandle> Submit(DequantizeWork work, const SubmitOptions& options,
                                    TaskDone done) override {
    return Route(std::move(work), options, std::move(done));
  }
  absl::StatusOr<std::shared_ptr<const PlacedWeight>> Prepare(
      const CanonicalWeight& weight) override;
  absl::Status WarmUp(const std::shared_ptr<const PlacedWeight>& weight) override {
    for (const WeightPart& part : weight->parts) {
      AWQD_RETURN_IF_ERROR(Of(*part.weight).engine->WarmUp(Whole(part.weight)));
    }
    return absl::OkStatus();
  }
  void Hurry() override {
    for (const auto& member : members_) member->engine->Hurry();
  }
  void Drain() override {
    for (const auto& member : members_) member->engine->Drain();
  }
  // Pinned memory is portable between GPUs; only memory of the CPU's pool would be slow for them.
  StagingPool& staging() override {
    for (const auto& member : members_) {
      if (!member->engine->device().host_addressable()) return member->engine->staging();
    }
    return members_.front()->engine->staging();
  }
  void FreeKeptMemory() override {
    for (const auto& member : members_) member->engine->FreeKeptMemory();
  }
  const Device& device() const override { return members_.front()->engine->device(); }
  std::vector<const Device*> devices() const override {
    std::vector<const Device*> out;
    for (const auto& member : members_) out.push_back(&member->engine->device());
    return out;
  }
  int64_t token_threshold() const override { return members_.front()->engine->token_threshold(); }
  int64_t TokenThreshold(const DeviceWeight& weight) const override {
    return Of(weight).engine->TokenThreshold(weight);
  }
  int64_t queued_tasks() const override {
    int64_t tasks = 0;
    for (const auto& member : members_) tasks += member->engine->queued_tasks();
    return tasks;
  }

 private:
  template <typename Work>
  absl::StatusOr<TaskHandle> Route(Work work, const SubmitOptions& options, TaskDone done) {
    if (!work.weight->cut()) return SubmitToOne(std::move(work), options, std::move(done));
    return SubmitToParts(std::move(work), options, std::move(done));
  }
  template <typename Work>
  absl::StatusOr<TaskHandle> SubmitToOne(Work work, const SubmitOptions& options, TaskDone done);
  template <typename Work>
  absl::StatusOr<TaskHandle> SubmitToParts(Work work, const SubmitOptions& options, TaskDone done);
  // To the device of work.part, counted while it lasts.
  template <typename Work>
  absl::StatusOr<TaskHandle> SubmitCounted(Work work, const SubmitOptions& options, TaskDone done);

  // A whole weight's parts in the order in which they should be tried.
  absl::InlinedVector<size_t, 8> Replicas(const PlacedWeight& weight);

  // Every weight was prepared on one of these devices.
  Member& Of(const DeviceWeight& weight) const {
    for (const auto& member : members_) {
      if (&member->engine->device() == weight.device) return *member;
    }
    return *members_.front();
  }

  std::vector<std::unique_ptr<Member>> members_;
  std::atomic<size_t> turn_{0};
};

template <typename Work>
absl::StatusOr<TaskHandle> RoutingEngine::SubmitCounted(Work work, const SubmitOptions& options,
                                                        TaskDone done) {
  Member& member = Of(work.here());
  const int64_t rows = RowsOf(work);
  member.outstanding += rows;
  auto counted = [&member, rows, done = std::move(done)](const absl::Status& status, Payload result,
                                                         const ExecutionReport& report) {
    member.outstanding -= rows;  // first: whoever hears the answer may bring the next request
    done(status, std::move(result), report);
  };
  // Devices work side by side, each with its own workers; one thread could run only one of them.
  SubmitOptions workers_run = options;
  workers_run.caller_runs = false;
  absl::StatusOr<TaskHandle> handle =
      member.engine->Submit(std::move(work), workers_run, std::move(counted));
  if (!handle.ok()) member.outstanding -= rows;
  return handle;
}

absl::InlinedVector<size_t, 8> RoutingEngine::Replicas(const PlacedWeight& weight) {
  struct Candidate {
    bool unhealthy;
    int64_t outstanding;
    size_t part;
  };
  const size_t count = weight.parts.size();
  const size_t turn = count > 1 ? turn_.fetch_add(1, std::memory_order_relaxed) : 0;
  absl::InlinedVector<Candidate, 8> candidates;
  for (size_t i = 0; i < count; ++i) {
    const size_t part = (turn + i) % count;
    const Member& member = Of(*weight.parts[part].weight);
    candidates.push_back({!member.engine->device().healthy(), member.outstanding.load(), part});
  }
  std::stable_sort(candidates.begin(), candidates.end(), [](const auto& a, const auto& b) {
    return std::pair(a.unhealthy, a.outstanding) < std::pair(b.unhealthy, b.outstanding);
  });
  absl::InlinedVector<size_t, 8> parts;
  for (const Candidate& candidate : candidates) parts.push_back(candidate.part);
  return parts;
}

template <typename Work>
absl::StatusOr<TaskHandle> RoutingEngine::SubmitToOne(Work work, const SubmitOptions& options,
                                                      TaskDone done) {
  const auto parts = Replicas(*work.weight);
  for (size_t part : parts) {
    work.part = part;
    if (part == parts.back()) break;
    absl::StatusOr<TaskHandle> handle = SubmitCounted(work, options, done);
    if (handle.ok() || !MayFitElsewhere(handle.status())) return handle;
  }
  return SubmitCounted(std::move(work), options, std::move(done));
}

template <typename Work>
absl::StatusOr<TaskHandle> RoutingEngine::SubmitToParts(Work work, const SubmitOptions& options,
                                                        TaskDone done) {
  const ColumnSpan wanted = ColumnsOf(work);
  const Shares shares = SharesOf(*work.weight, wanted);
  if (shares.size() == 1) {
    return SubmitCounted(Narrowed(std::move(work), shares[0].part, shares[0].columns), options,
                         std::move(done));
  }
  const int64_t size = SizeOf(work.out_dtype);
  const auto gather = std::make_shared<Gather>(
      &staging(), RowsOf(work), (wanted.end - wanted.begin) * size, shares.size(), std::move(done));
  for (size_t i = 0; i < shares.size(); ++i) {
    const auto& [part, columns] = shares[i];
    // The last takes the payload along, so that it is free when the answer is heard.
    Work piece = i + 1 < shares.size() ? Work(work) : std::move(work);
    absl::StatusOr<TaskHandle> handle =
        SubmitCounted(Narrowed(std::move(piece), part, columns), options,
                      gather->Part(i, (columns.begin - wanted.begin) * size,
                                   (columns.end - columns.begin) * size));
    if (!handle.ok()) {
      gather->Abandon();
      return handle.status();
    }
    gather->Accepted(*std::move(handle));
  }
  return TaskHandle([weak = std::weak_ptr<Gather>(gather)] {
    if (const auto alive = weak.lock()) alive->Cancel();
  });
}

absl::StatusOr<std::shared_ptr<const PlacedWeight>> RoutingEngine::Prepare(
    const CanonicalWeight& weight) {
  struct Candidate {
    Member* member;
    int64_t outstanding, free;
  };
  std::vector<Candidate> candidates;
  for (const auto& member : members_) {
    candidates.push_back({member.get(), member->outstanding, member->engine->device().FreeBytes()});
  }
  std::stable_sort(candidates.begin(), candidates.end(), [](const auto& a, const auto& b) {
    return std::pair(a.outstanding, -a.free) < std::pair(b.outstanding, -b.free);
  });
  absl::StatusOr<std::shared_ptr<const PlacedWeight>> placed;
  for (const Candidate& candidate : candidates) {
    placed = candidate.member->engine->Prepare(weight);
    if (placed.ok() || !MayFitElsewhere(placed.status())) break;
  }
  return placed;
}

}  // namespace

std::unique_ptr<Engine> MakeRoutingEngine(std::vector<std::unique_ptr<Engine>> engines) {
  if (engines.size() == 1) return std::move(engines.front());
  return std::make_unique<RoutingEngine>(std::move(engines));
}

}  // namespace awqd
