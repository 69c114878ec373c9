// InfoStream: what the streams of reflection and of load reports have in common. Each may be open
// for long, writes one small message at a time, and ends with the server.
#pragma once

#include <atomic>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "grpcpp/support/byte_buffer.h"
#include "kernels/base/mutex.h"
#include "server/transport/call.h"
#include "server/transport/drain.h"
#include "server/transport/limits.h"
#include "server/wire/status.h"

namespace awqd::services {

// Counts as one of `*open` for as long as it exists: gRPC owns it from Start to OnDone. `Call` is a
// transport::WriteCall or StreamCall.
template <typename Call>
class InfoStream : public transport::Reactor,
                   public std::enable_shared_from_this<InfoStream<Call>> {
 public:
  // `lease` is the call's, of nothing yet or of its request.
  InfoStream(Call* call, transport::ByteLease lease, std::atomic<int>* open)
      : call_(call), lease_(std::move(lease)), open_(open), others_(open_->fetch_add(1)) {}
  virtual ~InfoStream() { open_->fetch_sub(1); }

  // Once. RESOURCE_EXHAUSTED, naming `what`, where `most` were open before.
  void Start(transport::Drain* drain, int most, absl::string_view what) {
    if (others_ >= most) {
      return call_->Finish(wire::ToGrpc(absl::ResourceExhaustedError(
          absl::StrCat(what, ": got one more stream, expected at most ", most, " at once"))));
    }
    call_->SetReactor(this);
    {
      MutexLock lock(&mu_);
      self_ = this->shared_from_this();
      Begin();
    }
    draining_ =
        std::make_unique<transport::Drain::Listener>(drain, [weak = this->weak_from_this()] {
          if (const auto stream = weak.lock()) stream->End(transport::Drain::UnavailableStatus());
        });
  }

  void OnWriteDone(bool ok) final {
    MutexLock lock(&mu_);
    writing_ = false;
    if (!ok) return EndLocked(wire::ToGrpc(Cancelled()));
    ending_ ? Finish() : OnWritten();
  }
  void OnCancel() final { End(wire::ToGrpc(Cancelled())); }
  void OnDone() final { const std::shared_ptr<InfoStream> last = std::move(self_); }

 protected:
  // Starts the first read or alarm.
  virtual void Begin() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) = 0;
  // A message was written, and the stream goes on.
  virtual void OnWritten() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {}

  void Write(const grpc::ByteBuffer& message) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    writing_ = true;
    call_->StartWrite(message);
  }
  // A call cannot be finished while a write is in progress. The first reason to end counts.
  void EndLocked(const grpc::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (!ending_) status_ = status;
    ending_ = true;
    if (!writing_) Finish();
  }

  Call* const call_;
  Mutex mu_;
  transport::ByteLease lease_;  // of the message on the way; used by one event at a time
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool finished_ ABSL_GUARDED_BY(mu_) = false;

 private:
  static absl::Status Cancelled() { return absl::CancelledError("the client cancelled the call"); }
  void End(const grpc::Status& status) {
    MutexLock lock(&mu_);
    EndLocked(status);
  }
  void Finish() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (finished_) return;
    finished_ = true;
    call_->HurryAlarm();
    call_->FinishOnceRead(status_);
  }

  std::atomic<int>* const open_;
  const int others_;  // that were open before it
  bool ending_ ABSL_GUARDED_BY(mu_) = false;
  grpc::Status status_ ABSL_GUARDED_BY(mu_);  // once it is ending
  std::shared_ptr<InfoStream> self_;          // gRPC's share
  std::unique_ptr<transport::Drain::Listener> draining_;
};

}  // namespace awqd::services
