// RoutingEngine: chooses the devices of a request, and partitions it among them.
#include <algorithm>
#include <atomic>
#include <optional>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/mutex.h"
#include "kernels/base/parallel_for.h"
#include "kernels/base/status.h"
#include "server/engine/engine.h"
#include "server/engine/reassembly.h"

namespace awqd::engine {
namespace {

// A device's engine and its outstanding load. Both outlive the requests.
struct Member {
  std::atomic<int64_t> outstanding{0};  // load queued and running (Work::load)
  std::unique_ptr<Engine> engine;

  bool healthy() const { return engine->device().healthy(); }
};

// With GPUs some of the cores reassemble the results of parts, as they answer large batches.
int CountReassemblyThreads(absl::Span<const std::unique_ptr<Member>> members) {
  const bool cores_compute = std::all_of(members.begin(), members.end(), [](const auto& member) {
    return member->engine->device().host_addressable();
  });
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  return cores_compute ? 0 : std::min(8, cores / 4);
}

// Another replica may have room, or life, where this one has not.
bool MayFitElsewhere(const absl::Status& status) {
  return absl::IsResourceExhausted(status) || absl::IsFailedPrecondition(status);
}

// A device needs its part of every weight of the work.
absl::Status CheckTogether(const Work& work) {
  const auto weights = work.weights();
  for (const auto& weight : weights) {
    if (work.part < weight->parts.size() &&
        weight->parts[work.part].weight->device == work.device()) {
      continue;
    }
    return absl::FailedPreconditionError(
        absl::StrCat(work.name(), ": got weights on ", weights[0]->devices(), " and on ",
                     weight->devices(), ", expected all on the same devices"));
  }
  return absl::OkStatus();
}

class RoutingEngine final : public Engine {
 public:
  explicit RoutingEngine(std::vector<std::unique_ptr<Engine>> engines) {
    for (std::unique_ptr<Engine>& engine : engines) {
      members_.push_back(std::make_unique<Member>());
      members_.back()->engine = std::move(engine);
    }
    pool_.emplace(CountReassemblyThreads(members_));
  }
  // One engine's parts use another's staging memory, so all end before any of them goes.
  ~RoutingEngine() override { Drain(); }

  using Engine::Submit;
  absl::StatusOr<TaskHandle> Submit(std::unique_ptr<Work>* work, const SubmitOptions& options,
                                    TaskDone done) override {
    return (*work)->partitioned() ? SubmitToParts(work, options, std::move(done))
                                  : SubmitToOne(work, options, std::move(done));
  }

  absl::Status CheckArrival(absl::Time deadline) override {
    absl::Status status;
    for (const auto& member : members_) {
      status = member->engine->CheckArrival(deadline);
      if (status.ok()) break;
    }
    return status;
  }

  void RecordAnswer(bool in_time) override {
    for (const auto& member : members_) member->engine->RecordAnswer(in_time);
  }
  using Engine::Prepare;
  absl::StatusOr<std::shared_ptr<const model::PlacedWeight>> Prepare(
      const HostWeight& weight, const Device* device) override {
    if (device != nullptr) return FindMember(device).engine->Prepare(weight);
    struct Candidate {
      Member* member;
      int64_t outstanding, free;
    };
    std::vector<Candidate> candidates;
    for (const auto& member : members_) {
      if (!member->healthy()) continue;
      candidates.push_back(
          {member.get(), member->outstanding, member->engine->device().FreeBytes()});
    }
    if (candidates.empty()) return absl::FailedPreconditionError("every device has failed");
    std::stable_sort(candidates.begin(), candidates.end(), [](const auto& a, const auto& b) {
      return std::pair(a.outstanding, -a.free) < std::pair(b.outstanding, -b.free);
    });
    absl::StatusOr<std::shared_ptr<const model::PlacedWeight>> placed;
    for (const Candidate& candidate : candidates) {
      placed = candidate.member->engine->Prepare(weight);
      if (placed.ok() || !MayFitElsewhere(placed.status())) break;
    }
    return placed;
  }

  // On all devices at the same time.
  absl::Status WarmUp(const std::shared_ptr<const model::PlacedWeight>& weight) override {
    std::vector<absl::Status> ended(weight->parts.size());
    ParallelFor(ended.size(), [&](size_t part) {
      const auto& here = weight->parts[part].weight;
      ended[part] = FindMember(here->device).engine->WarmUp(model::MakeWhole(here));
    });
    for (const absl::Status& status : ended) AWQD_RETURN_IF_ERROR(status);
    return absl::OkStatus();
  }

  void Hurry() override {
    for (const auto& member : members_) member->engine->Hurry();
  }
  // Later stages of accepted requests are still submitted.
  void Drain() override {
    Hurry();
    {
      MutexLock lock(&mu_);
      draining_ = true;
      while (staged_ > 0) all_ended_.Wait(&mu_);
    }
    for (const auto& member : members_) member->engine->Drain();
  }

  // Pinned memory is portable between GPUs; only memory of the CPU's pool would be slow for them.
  // A GPU that has failed pins no more.
  StagingPool& staging() override {
    const Member* best = members_.front().get();
    for (const auto& member : members_) {
      const auto rank = [](const Member& m) {
        return std::pair(m.healthy(), !m.engine->device().host_addressable());
      };
      if (rank(*member) > rank(*best)) best = member.get();
    }
    return best->engine->staging();
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
    return FindMember(weight.device).engine->TokenThreshold(weight);
  }
  int64_t queued_tasks() const override {
    int64_t tasks = 0;
    for (const auto& member : members_) tasks += member->engine->queued_tasks();
    return tasks;
  }
  std::vector<obs::DeviceStats> stats() const override {
    std::vector<obs::DeviceStats> out;
    for (const auto& member : members_) {
      for (obs::DeviceStats& one : member->engine->stats()) out.push_back(std::move(one));
    }
    return out;
  }

 private:
  absl::StatusOr<TaskHandle> SubmitToOne(std::unique_ptr<Work>* work, const SubmitOptions& options,
                                         TaskDone done) {
    const auto parts = Replicas(**work);
    for (size_t part : parts) {
      (*work)->part = part;
      if (part == parts.back()) break;
      absl::StatusOr<TaskHandle> handle = SubmitCounted(work, options, done);
      if (handle.ok() || !MayFitElsewhere(handle.status())) return handle;
    }
    return SubmitCounted(work, options, std::move(done));
  }

  absl::StatusOr<TaskHandle> SubmitToParts(std::unique_ptr<Work>* work,
                                           const SubmitOptions& options, TaskDone done) {
    AWQD_ASSIGN_OR_RETURN(WorkPartition partition, (*work)->Partition(staging()));
    work->reset();  // the parts alone hold the payload, so that it is free when the answer is heard
    if (partition.next == nullptr) return SubmitPartition(partition, options, std::move(done));
    const auto stages = std::make_shared<Stages>(this);
    if (!stages->accepted()) return absl::UnavailableError("the server is draining");
    AWQD_RETURN_IF_ERROR(SubmitStage(partition, options, std::move(done), stages));
    return TaskHandle([weak = std::weak_ptr<Stages>(stages)] {
      if (const auto alive = weak.lock()) alive->Cancel();
    });
  }

  // A request in stages, counted until its last one has ended; the handles of those submitted.
  // Thread-safe.
  class Stages {
   public:
    explicit Stages(RoutingEngine* engine) : engine_(engine) {
      MutexLock lock(&engine_->mu_);
      accepted_ = !engine_->draining_;
      ++engine_->staged_;
    }
    ~Stages() {
      MutexLock lock(&engine_->mu_);
      if (--engine_->staged_ == 0) engine_->all_ended_.NotifyAll();
    }
    Stages(const Stages&) = delete;
    Stages& operator=(const Stages&) = delete;

    bool accepted() const { return accepted_; }
    void Add(TaskHandle handle) {
      {
        MutexLock lock(&mu_);
        if (!cancelled_) {
          handles_.push_back(std::move(handle));
          return;
        }
      }
      handle.Cancel();
    }
    void Cancel() {
      std::vector<TaskHandle> handles;
      {
        MutexLock lock(&mu_);
        cancelled_ = true;
        handles = std::exchange(handles_, {});
      }
      for (const TaskHandle& handle : handles) handle.Cancel();
    }

   private:
    RoutingEngine* const engine_;
    bool accepted_ = false;
    Mutex mu_;
    bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
    std::vector<TaskHandle> handles_ ABSL_GUARDED_BY(mu_);
  };

  // Its last part to end submits the next stage, if there is one, or answers.
  absl::Status SubmitStage(WorkPartition& partition, const SubmitOptions& options, TaskDone done,
                           const std::shared_ptr<Stages>& stages) {
    TaskDone ended = done;
    if (partition.next != nullptr) {
      ended = [this, options, stages, next = std::move(partition.next), done = std::move(done)](
                  const absl::Status& status, Payload result, const ExecutionReport& report) {
        const auto submit = [&]() -> absl::Status {
          AWQD_RETURN_IF_ERROR(status);
          AWQD_ASSIGN_OR_RETURN(WorkPartition later, next(std::move(result)));
          return SubmitStage(
              later, options,
              [done, report](const absl::Status& last, Payload whole,
                             const ExecutionReport& of_later) {
                ExecutionReport all = of_later;
                AddStage(report, &all);
                done(last, std::move(whole), all);
              },
              stages);
        };
        if (const absl::Status failed = submit(); !failed.ok()) done(failed, Payload(), report);
      };
    }
    AWQD_ASSIGN_OR_RETURN(TaskHandle handle, SubmitPartition(partition, options, std::move(ended)));
    stages->Add(std::move(handle));
    return absl::OkStatus();
  }

  absl::StatusOr<TaskHandle> SubmitPartition(WorkPartition& partition, const SubmitOptions& options,
                                             TaskDone done) {
    StagingPool& memory = staging();
    if (partition.reassembler == nullptr)
      return SubmitCounted(&partition.parts[0], options, std::move(done));
    const auto request =
        std::make_shared<PartitionedRequest>(&memory, &*pool_, &partition, std::move(done));
    for (size_t i = 0; i < partition.parts.size(); ++i) {
      absl::StatusOr<TaskHandle> handle =
          SubmitCounted(&partition.parts[i], options, request->MakeCallback(i));
      if (!handle.ok()) {
        request->Abandon();
        return handle.status();
      }
      request->AddHandle(*std::move(handle));
    }
    return TaskHandle([weak = std::weak_ptr<PartitionedRequest>(request)] {
      if (const auto alive = weak.lock()) alive->Cancel();
    });
  }

  // To the device of (*work)->part, counted while it lasts.
  absl::StatusOr<TaskHandle> SubmitCounted(std::unique_ptr<Work>* work,
                                           const SubmitOptions& options, TaskDone done) {
    AWQD_RETURN_IF_ERROR(CheckTogether(**work));
    Member& member = FindMember(**work, (*work)->part);
    const int64_t load = (*work)->load();
    TaskDone counted = [&member, load, done = std::move(done)](const absl::Status& status,
                                                               Payload result,
                                                               const ExecutionReport& report) {
      member.outstanding -= load;  // first: whoever hears the answer may bring the next request
      done(status, std::move(result), report);
    };
    member.outstanding += load;  // once nothing can fail but Submit
    // Devices work side by side, each with its own workers; one thread could run only one of them.
    SubmitOptions workers_run = options;
    workers_run.caller_runs = false;
    absl::StatusOr<TaskHandle> handle =
        member.engine->Submit(work, workers_run, std::move(counted));
    if (!handle.ok()) member.outstanding -= load;
    return handle;
  }

  // A work's parts, all whole, in the order in which they should be tried; of devices that work,
  // where one does.
  absl::InlinedVector<size_t, 8> Replicas(const Work& work) {
    struct Candidate {
      bool unhealthy;
      int64_t outstanding;
      size_t part;
    };
    const auto weights = work.weights();
    const size_t count = weights.empty() ? members_.size() : weights.front()->parts.size();
    const size_t turn = count > 1 ? turn_.fetch_add(1, std::memory_order_relaxed) : 0;
    absl::InlinedVector<Candidate, 8> candidates;
    for (size_t i = 0; i < count; ++i) {
      const size_t part = (turn + i) % count;
      const Member& member = FindMember(work, part);
      candidates.push_back({!member.healthy(), member.outstanding.load(), part});
    }
    std::stable_sort(candidates.begin(), candidates.end(), [](const auto& a, const auto& b) {
      return std::pair(a.unhealthy, a.outstanding) < std::pair(b.unhealthy, b.outstanding);
    });
    absl::InlinedVector<size_t, 8> parts;
    for (const Candidate& candidate : candidates) {
      if (candidate.unhealthy == candidates.front().unhealthy) parts.push_back(candidate.part);
    }
    return parts;
  }

  // The member whose device runs part `part` of the work. Every device has a part of a work without
  // weights.
  Member& FindMember(const Work& work, size_t part) const {
    if (work.weights().empty()) return *members_[part];
    return FindMember(work.weights().front()->parts[part].weight->device);
  }

  // Every weight was prepared on one of these devices.
  Member& FindMember(const Device* device) const {
    for (const auto& member : members_) {
      if (&member->engine->device() == device) return *member;
    }
    return *members_.front();
  }

  std::vector<std::unique_ptr<Member>> members_;
  std::optional<ThreadPool> pool_;  // reassembles results of parts
  std::atomic<size_t> turn_{0};
  Mutex mu_;
  CondVar all_ended_;
  bool draining_ ABSL_GUARDED_BY(mu_) = false;
  int64_t staged_ ABSL_GUARDED_BY(mu_) = 0;  // requests in stages
};

}  // namespace

std::unique_ptr<Engine> MakeRoutingEngine(std::vector<std::unique_ptr<Engine>> engines) {
  if (engines.size() == 1) return std::move(engines.front());
  return std::make_unique<RoutingEngine>(std::move(engines));
}

}  // namespace awqd::engine
