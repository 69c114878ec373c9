// StreamHandler: reads requests, keeps their handlers, writes their answers.
//
// It bounds memory by not reading. A request counts, with its objects and the answer that is
// expected, from its read until its answer was written. So a client that does not read its answers
// is not read either.
#include "server/services/call_handlers.h"

#include <algorithm>
#include <deque>
#include <set>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "kernels/base/mutex.h"
#include "server/transport/limits.h"

namespace awqd::services {
namespace {

class StreamHandler final : public transport::Reactor,
                            public std::enable_shared_from_this<StreamHandler> {
 public:
  // `objects`: a lease of the call, of nothing yet.
  StreamHandler(const Env& env, transport::StreamCall* call, StreamProtocol protocol,
                transport::ByteLease objects)
      : env_(env), call_(call), protocol_(std::move(protocol)), objects_(std::move(objects)) {}

  // Answers come on threads that gRPC does not know, so the stream is shared between gRPC (until
  // OnDone) and the answers that are still to come.
  void Start() {
    {
      MutexLock lock(&mu_);
      self_ = shared_from_this();
      ReadMore();
    }
    transport::Drain* const drain = env_.admission->drain();
    draining_ = std::make_unique<transport::Drain::Listener>(drain, [weak = weak_from_this()] {
      if (const auto stream = weak.lock()) stream->Drain();
    });
  }

  void OnReadDone(bool ok) override {
    ItemPtr item;
    {
      MutexLock lock(&mu_);
      if (!ok || cancelled_ || finished_) {
        reading_ = false;
        half_closed_ = true;
        FinishIfIdle();
        return;
      }
      item = AcceptItem();
    }
    item->handler->Start(&item->message, env_.admission->drain());
    MutexLock lock(&mu_);
    UpdateBytes(*item);
    item->parsing_elsewhere = !item->answered && item->handler->is_large();
    reading_ = false;  // not before: what the item will hold is known only now
    ReadMore();
  }

  void OnWriteDone(bool ok) override {
    MutexLock lock(&mu_);
    writing_ = false;
    if (!ok) half_closed_ = true;  // the client is gone; what is in flight still has to come back
    RemoveItem(answers_.front());
    answers_.pop_front();
    WriteNext();
    ReadMore();
    FinishIfIdle();
  }

  void OnCancel() override {
    std::vector<std::shared_ptr<RequestHandler>> handlers;
    {
      MutexLock lock(&mu_);
      cancelled_ = true;
      half_closed_ = true;
      for (const auto& item : items_) handlers.push_back(item->handler);
    }
    for (const auto& handler : handlers) handler->Cancel();
    MutexLock lock(&mu_);
    FinishIfIdle();
  }

  void OnDone() override { const std::shared_ptr<StreamHandler> last = std::move(self_); }

 private:
  // Nothing more is read. The requests that were read are answered, then the stream ends.
  void Drain() {
    MutexLock lock(&mu_);
    drained_ = !half_closed_;
    half_closed_ = true;
    FinishIfIdle();
  }

  struct Item {
    grpc::ByteBuffer message;
    grpc::ByteBuffer answer;
    std::shared_ptr<RequestHandler> handler;
    int64_t bytes = 0;
    bool parsing_elsewhere = false;
    bool answered = false;
    bool removed = false;
  };
  using ItemPtr = std::shared_ptr<Item>;

  // Turns the message just read into an item in flight. The caller starts its handler without the
  // lock, because the answer may come at once.
  ItemPtr AcceptItem() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    ItemPtr item = std::move(next_);
    item->handler = protocol_.make_handler(
        item->message,
        [self = shared_from_this(), item](const absl::Status& status, grpc::ByteBuffer answer) {
          self->OnAnswer(item, status, std::move(answer));
        });
    items_.insert(item);
    if (protocol_.in_order) order_.push_back(item);
    return item;
  }

  void OnAnswer(const ItemPtr& item, const absl::Status& status, grpc::ByteBuffer answer) {
    if (!status.ok()) {
      answer = protocol_.encode_error(item->handler->request_id(), status);
      item->handler->HoldError(static_cast<int64_t>(answer.Length()));
    }
    MutexLock lock(&mu_);
    item->answer.Swap(&answer);
    item->answered = true;
    item->parsing_elsewhere = false;
    UpdateBytes(*item);
    QueueAnswer(item);
    WriteNext();
    ReadMore();  // an answer may hold less than its request did
    FinishIfIdle();
  }

  // An answered item leaves at once, or once all before it are answered.
  void QueueAnswer(const ItemPtr& item) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (!protocol_.in_order) return answers_.push_back(item);
    for (; !order_.empty() && order_.front()->answered; order_.pop_front()) {
      answers_.push_back(std::move(order_.front()));
    }
  }

  // The item's bytes change when its handler has started, and when it has ended.
  void UpdateBytes(Item& item) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (item.removed) return;
    const int64_t bytes = item.handler->held_bytes();
    bytes_ += bytes - item.bytes;
    item.bytes = bytes;
  }

  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    while (cancelled_ && !writing_ && !answers_.empty()) {
      RemoveItem(answers_.front());
      answers_.pop_front();
    }
    if (writing_ || answers_.empty()) return;
    writing_ = true;
    call_->StartWrite(answers_.front()->answer);
  }

  void RemoveItem(const ItemPtr& item) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    bytes_ -= item->bytes;
    item->removed = true;
    items_.erase(item);
    objects_.ShrinkTo(ObjectBytes());
  }

  // A message that is parsed off the loop waits there with others. A stream has one such message at
  // a time: more would only hold memory. The same holds for an error that the budget has no room
  // for.
  void ReadMore() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (std::any_of(items_.begin(), items_.end(), [](const ItemPtr& item) {
          return item->parsing_elsewhere || (item->answered && item->bytes == 0);
        })) {
      return;
    }
    const bool full = static_cast<int64_t>(items_.size()) >= env_.options.stream_in_flight ||
                      (!items_.empty() && bytes_ >= env_.options.stream_in_flight_bytes);
    if (reading_ || half_closed_ || finished_ || full) return;
    // One item is always let in: its own demand says whether there is room.
    if (!objects_.Resize(ObjectBytes(), "requests of a stream").ok() && !items_.empty()) return;
    next_ = std::make_shared<Item>();
    reading_ = true;
    call_->StartRead(&next_->message);
  }

  // A handler takes so much beside its message and answer.
  int64_t ObjectBytes() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    constexpr int64_t kOfOne = 4 << 10;
    return static_cast<int64_t>(items_.size()) * kOfOne;
  }

  // A read that is still out ends with the call, so it never holds Finish back.
  void FinishIfIdle() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (finished_ || !half_closed_ || !items_.empty()) return;
    finished_ = true;
    if (cancelled_) {
      call_->Finish(wire::ToGrpc(absl::CancelledError("the client cancelled the call")));
    } else {
      call_->FinishOnceRead(drained_ ? transport::Drain::UnavailableStatus() : grpc::Status::OK);
    }
  }

  const Env& env_;
  transport::StreamCall* const call_;
  const StreamProtocol protocol_;
  std::shared_ptr<StreamHandler> self_;  // gRPC's share
  Mutex mu_;
  ItemPtr next_ ABSL_GUARDED_BY(mu_);                 // the message being read
  std::set<ItemPtr> items_ ABSL_GUARDED_BY(mu_);      // read and not yet answered
  std::deque<ItemPtr> order_ ABSL_GUARDED_BY(mu_);    // of items_ whose answers wait for their turn
  std::deque<ItemPtr> answers_ ABSL_GUARDED_BY(mu_);  // the first one is being written
  int64_t bytes_ ABSL_GUARDED_BY(mu_) = 0;            // of items_
  transport::ByteLease objects_ ABSL_GUARDED_BY(mu_);  // of items_, beside those bytes
  bool reading_ ABSL_GUARDED_BY(mu_) = false;
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool half_closed_ ABSL_GUARDED_BY(mu_) = false;  // nothing more will be read
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
  bool drained_ ABSL_GUARDED_BY(mu_) = false;  // the server stops; the client had more to send
  bool finished_ ABSL_GUARDED_BY(mu_) = false;
  std::unique_ptr<transport::Drain::Listener> draining_;
};

}  // namespace

void HandleStream(const Env& env, transport::StreamCall* call, StreamProtocol protocol) {
  absl::StatusOr<transport::ByteLease> objects =
      env.in_flight->AcquireBytes(call->charge(), 0, "requests of a stream");
  if (!objects.ok()) return call->Finish(wire::ToGrpc(objects.status()));
  const auto stream =
      std::make_shared<StreamHandler>(env, call, std::move(protocol), *std::move(objects));
  call->SetReactor(stream.get());
  // Without memory from here on the call would be left to a stream that is gone: the process ends.
  const auto start = [&]() noexcept { stream->Start(); };
  start();
}

}  // namespace awqd::services
