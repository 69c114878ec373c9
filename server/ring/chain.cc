// Each step is a call like one of a slot; its end starts the next one.
#include "server/ring/chain.h"

#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"

namespace awqd::ring {
namespace {

struct Step {
  PreparedPtr prepared;
  uint32_t x = 0, router = 0;  // as in ChainStep
  // Bytes of a token that all results before take.
  int64_t before = 0;
};

// A chain that runs: keeps its call until the last step has ended.
class Progress : public std::enable_shared_from_this<Progress> {
 public:
  Progress(const std::vector<Step>& steps, std::shared_ptr<Call> call)
      : steps_(steps), call_(std::move(call)) {}

  // Starts step `index`, or ends the call.
  void Run(size_t index);
  // Withdraws the step that runs, and runs no other.
  void Cancel() {
    std::function<void()> cancel;
    {
      MutexLock lock(&mu_);
      cancelled_ = true;
      cancel = cancel_;
    }
    if (cancel) cancel();
  }
  void EndStep(size_t index, const absl::Status& status, Outcome outcome);

 private:
  class StepCall;

  const std::vector<Step> steps_;
  const std::shared_ptr<Call> call_;
  std::shared_ptr<StreamPoint> point_;  // behind the last step; of the thread that runs a step
  Mutex mu_;
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
  size_t running_ ABSL_GUARDED_BY(mu_) = 0;
  std::function<void()> cancel_ ABSL_GUARDED_BY(mu_);  // of the running step
};

class Progress::StepCall final : public Call {
 public:
  StepCall(std::shared_ptr<Progress> progress, size_t index, const Request& request)
      : Call(request, progress->call_->deadline(), progress->call_->memory(),
             progress->call_->state()),
        progress_(std::move(progress)),
        index_(index) {}

  void End(const absl::Status& status) override {
    progress_->EndStep(index_, status, std::move(*outcome()));
  }

 private:
  const std::shared_ptr<Progress> progress_;
  const size_t index_;
};

void Progress::Run(size_t index) {
  const Step& step = steps_[index];
  Request request = call_->request();
  // The client's numbers may be any: a place that overflows is one that no payload has.
  const auto place = [&](const Step& of) {
    int64_t bytes = 0, out = 0;
    const bool overflows = __builtin_mul_overflow(request.tokens, of.before, &bytes) ||
                           __builtin_add_overflow(call_->request().y_offset, bytes, &out);
    return overflows ? int64_t{-1} : out;
  };
  if (step.x > 0) request.x_offset = place(steps_[step.x - 1]);
  if (step.router > 0) request.router_offset = place(steps_[step.router - 1]);
  request.y_offset = place(step);
  {
    MutexLock lock(&mu_);
    running_ = index;
    cancel_ = nullptr;
  }
  const auto step_call = std::make_shared<StepCall>(shared_from_this(), index, request);
  const auto before = std::move(point_);
  point_ = index + 1 < steps_.size() ? step.prepared->MakePoint() : nullptr;
  step_call->SetPoints(before, point_);
  std::function<void()> cancel = step.prepared->Run(step_call);
  bool cancelled = false;
  {
    MutexLock lock(&mu_);
    if (running_ != index) return;  // another step runs by now, or none
    cancel_ = cancel;
    cancelled = cancelled_;
  }
  if (cancelled) cancel();
}

void Progress::EndStep(size_t index, const absl::Status& status, Outcome outcome) {
  bool cancelled = false;
  std::function<void()> last;  // destroyed without the lock, because it owns the handler
  {
    MutexLock lock(&mu_);
    running_ = index + 1;
    last.swap(cancel_);
    cancelled = cancelled_;
  }
  if (!status.ok()) {
    return call_->End(
        absl::Status(status.code(), absl::StrCat("step ", index + 1, ": ", status.message())));
  }
  Outcome& sum = *call_->outcome();
  if (!sum.kernel.empty()) absl::StrAppend(&sum.kernel, ",");
  absl::StrAppend(&sum.kernel, outcome.kernel);
  sum.device = std::move(outcome.device);
  sum.queue_us += outcome.queue_us;
  sum.compute_us += outcome.compute_us;
  sum.batch_tokens = outcome.batch_tokens;
  sum.batch_requests = outcome.batch_requests;
  sum.path = outcome.path;
  sum.y_bytes += outcome.y_bytes;
  if (cancelled) return call_->End(absl::CancelledError("the client cancelled the call"));
  if (index + 1 == steps_.size()) return call_->End(absl::OkStatus());
  Run(index + 1);
}

class Chain final : public Prepared {
 public:
  Chain(std::vector<Step> steps, const PreparedBody& body, transport::Admission::Entry* entry)
      : steps_(std::move(steps)), body_(body), entry_(entry) {}

  transport::Admission::Entry* entry() const override { return entry_; }
  const PreparedBody& body() const override { return body_; }
  std::optional<std::string> place() const override { return std::nullopt; }  // no step of another
  std::function<void()> Run(const std::shared_ptr<Call>& call) const override {
    const auto progress = std::make_shared<Progress>(steps_, call);
    progress->Run(0);
    return [progress] { progress->Cancel(); };
  }

 private:
  const std::vector<Step> steps_;
  const PreparedBody body_;
  transport::Admission::Entry* const entry_;
};

}  // namespace

absl::StatusOr<PreparedPtr> MakeChain(const Ring& ring, absl::string_view steps,
                                      transport::Admission::Entry* entry) {
  const size_t count = steps.size() / sizeof(ChainStep);
  if (count == 0 || count > kMaxChainSteps || steps.size() % sizeof(ChainStep) != 0) {
    return absl::InvalidArgumentError(absl::StrCat("steps: got ", steps.size(), " bytes, expected ",
                                                   sizeof(ChainStep), " for each of 1 to ",
                                                   kMaxChainSteps));
  }
  std::vector<Step> out(count);
  PreparedBody body = {};
  std::string region;
  for (size_t i = 0; i < count; ++i) {
    ChainStep wanted;
    std::memcpy(&wanted, steps.data() + i * sizeof(wanted), sizeof(wanted));
    const auto refuse = [&](absl::string_view field, const auto& got, const auto& expected) {
      return absl::InvalidArgumentError(
          absl::StrCat("steps[", i, "].", field, ": got ", got, ", expected ", expected));
    };
    Step& step = out[i];
    step = {ring.FindPrepared(wanted.call), wanted.x, wanted.router, body.y_bytes};
    if (step.prepared == nullptr || !step.prepared->place()) {
      return refuse("call", wanted.call,
                    "a prepared call whose tensors are in the payload or in one region");
    }
    if (i == 0) region = *step.prepared->place();
    if (region != *step.prepared->place()) {
      return refuse("call", absl::StrCat("tensors in region \"", *step.prepared->place(), "\""),
                    absl::StrCat("those of the first step's, \"", region, "\""));
    }
    if (wanted.router > 0 && !region.empty()) {
      return refuse("router", wanted.router, "0: results in a region are not read by the server");
    }
    const PreparedBody& own = step.prepared->body();
    if (i == 0) body = {.x_bytes = own.x_bytes, .x_dtype = own.x_dtype};
    // A tensor of the step is the result of step `from`, or of the call, whose first one says how
    // it looks: `bytes` a token, of type `dtype`.
    const auto connect = [&](absl::string_view field, uint32_t from, int64_t own_bytes,
                             uint32_t own_dtype, int64_t* bytes, uint32_t* dtype) {
      if (from > i) return refuse(field, from, "an earlier step, or 0");
      if (from > 0) {
        const PreparedBody& source = out[from - 1].prepared->body();
        if (source.y_bytes == own_bytes && source.y_dtype == own_dtype) return absl::OkStatus();
        return refuse(field,
                      absl::StrCat(source.y_bytes, " bytes a token of type ", source.y_dtype),
                      absl::StrCat(own_bytes, " of type ", own_dtype));
      }
      if (own_bytes == 0) return absl::OkStatus();
      if (*bytes == 0) *bytes = own_bytes, *dtype = own_dtype;
      if (*bytes == own_bytes && *dtype == own_dtype) return absl::OkStatus();
      return refuse(field, absl::StrCat(*bytes, " bytes a token of type ", *dtype),
                    absl::StrCat(own_bytes, " of type ", own_dtype));
    };
    uint32_t none = 0;
    AWQD_RETURN_IF_ERROR(
        connect("x", wanted.x, own.x_bytes, own.x_dtype, &body.x_bytes, &body.x_dtype));
    AWQD_RETURN_IF_ERROR(connect("router", wanted.router, own.router_bytes, own.router_dtype,
                                 &body.router_bytes, &body.router_dtype));
    AWQD_RETURN_IF_ERROR(connect("ids", 0, own.ids_bytes, 0, &body.ids_bytes, &none));
    AWQD_RETURN_IF_ERROR(connect("scales", 0, own.scales_bytes, 0, &body.scales_bytes, &none));
    body.y_bytes += own.y_bytes;
    body.y_columns = own.y_columns;
    body.y_dtype = own.y_dtype;
  }
  return std::make_shared<Chain>(std::move(out), body, entry);
}

}  // namespace awqd::ring
