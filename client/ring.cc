// Frames over the socket, slots in the memory.
#include "client/ring.h"

#include <linux/futex.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "awqd/ring/layout.h"
#include "client/convert.h"
#include "client/credentials.h"
#include "kernels/base/mutex.h"
#include "kernels/base/spin.h"
#include "kernels/base/status.h"
#include "kernels/base/unique_fd.h"

namespace awqd::client {
namespace {

using ring::Frame;

// How often a sleeping caller looks whether the server still lives.
constexpr absl::Duration kLookInterval = absl::Milliseconds(20);
// How much longer than its deadline a caller waits: the server answers late calls itself.
constexpr absl::Duration kGrace = absl::Milliseconds(100);

int64_t SteadyNs() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

absl::Status Gone(absl::string_view why) {
  return absl::UnavailableError(absl::StrCat("ring: the server has closed it: ", why));
}

// `descriptor`: goes with the first byte, unless it is negative.
absl::Status SendAll(int socket, const Frame& frame, absl::string_view body, int descriptor) {
  std::string bytes(reinterpret_cast<const char*>(&frame), sizeof(frame));
  bytes.append(body.data(), body.size());
  for (size_t sent = 0; sent < bytes.size();) {
    iovec part = {bytes.data() + sent, bytes.size() - sent};
    msghdr message = {};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    if (sent == 0 && descriptor >= 0) {
      message.msg_control = control;
      message.msg_controllen = sizeof(control);
      cmsghdr* const header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(header), &descriptor, sizeof(int));
    }
    const ssize_t now = sendmsg(socket, &message, MSG_NOSIGNAL);
    if (now < 0 && errno == EINTR) continue;
    // A server that refuses the connection has said why, which is still to be read.
    if (now < 0 && errno == EPIPE) return absl::OkStatus();
    if (now < 0) return absl::UnavailableError(absl::StrCat("ring: sending: ", strerror(errno)));
    sent += static_cast<size_t>(now);
  }
  return absl::OkStatus();
}

// `fds`: as MappedRing::Exchange.
absl::Status ReceiveAll(int socket, char* out, size_t size, UniqueFd* fds) {
  for (size_t got = 0; got < size;) {
    iovec part = {out + got, size - got};
    alignas(cmsghdr) char control[CMSG_SPACE(3 * sizeof(int))] = {};
    msghdr message = {};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    const ssize_t now = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
    if (now < 0 && errno == EINTR) continue;
    if (now < 0 && errno == EAGAIN) {
      return absl::DeadlineExceededError("ring: the server did not answer in time");
    }
    if (now <= 0) return Gone(now < 0 ? strerror(errno) : "end of the connection");
    const cmsghdr* const header = CMSG_FIRSTHDR(&message);
    if (header != nullptr && header->cmsg_type == SCM_RIGHTS) {
      int received[3] = {-1, -1, -1};
      std::memcpy(received, CMSG_DATA(header),
                  std::min(sizeof(received), static_cast<size_t>(header->cmsg_len - CMSG_LEN(0))));
      for (int i = 0; i < 3; ++i) {
        UniqueFd fd(received[i]);
        if (fds != nullptr) fds[i] = std::move(fd);
      }
    }
    got += static_cast<size_t>(now);
  }
  return absl::OkStatus();
}

// The tensors of each call are in the memory: what is left says how they look.
template <typename Request>
void ClearContents(Request* request) {
  request->mutable_activations()->clear_raw();
  if constexpr (requires { request->mutable_expert_ids(); }) {
    if (request->has_expert_ids()) request->mutable_expert_ids()->clear_raw();
    if (request->has_router_weights()) request->mutable_router_weights()->clear_raw();
    if (request->has_router()) request->mutable_router()->mutable_logits()->clear_raw();
  }
  if (request->has_activation_scales() && request->activation_scales().raw().empty()) {
    request->mutable_activation_scales()->clear_raw();
  }
}

// --- The ring ---

class MappedRing final : public Ring {
 public:
  explicit MappedRing(const RingOptions& options) : options_(options) {}
  ~MappedRing() override {
    if (base_ != nullptr) munmap(base_, static_cast<size_t>(size_));
  }

  absl::Status Connect();
  absl::Status OpenMemory(const std::string& authorization);

  char* payload() const override { return base_ + payload_offset_; }
  int64_t payload_bytes() const override { return payload_bytes_; }
  absl::StatusOr<RingPrepared> Prepare(MatmulCall call) override {
    return PrepareRequest(ring::kQuantizedMatmul, ToRequest(std::move(call)));
  }
  absl::StatusOr<RingPrepared> Prepare(GroupedMatmulCall call) override {
    return PrepareRequest(ring::kGroupedQuantizedMatmul, ToRequest(std::move(call)));
  }
  absl::StatusOr<RingPrepared> Prepare(GatedMlpCall call) override {
    return PrepareRequest(ring::kGatedMlp, ToRequest(std::move(call)));
  }
  absl::StatusOr<RingPrepared> PrepareChain(const std::vector<RingStep>& steps) override;
  absl::Status Release(uint32_t number) override;
  absl::Status ShareMemory(const v1::ShareMemoryRequest& request, int descriptor) override;
  absl::Status UnshareMemory(absl::string_view region) override;
  absl::StatusOr<uint32_t> Submit(const RingCall& call) override;
  RingAnswer Wait(uint32_t slot) override;
  bool answered(uint32_t slot) const override {
    return this->slot(slot)->answer.state.load() == ring::kAnswered;
  }
  ring::Header* header() const override { return reinterpret_cast<ring::Header*>(base_); }
  ring::Slot* slot(uint32_t index) const override {
    return reinterpret_cast<ring::Slot*>(base_ + ring::kHeaderBytes) + index;
  }

 private:
  // Sends a frame and receives its answer. `fds`: takes three descriptors, or null. `descriptor`: as
  // SendAll.
  absl::StatusOr<Frame> Exchange(uint32_t kind, uint64_t value, absl::string_view body,
                                 std::string* answer, UniqueFd* fds = nullptr, int descriptor = -1)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(socket_mu_);
  template <typename Request>
  absl::StatusOr<RingPrepared> PrepareRequest(ring::Method method, Request request);
  absl::StatusOr<RingPrepared> PrepareBytes(ring::Method method, const std::string& request);
  bool server_gone() const;
  void CollectAbandoned() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const RingOptions options_;
  UniqueFd socket_, event_;
  char* base_ = nullptr;
  int64_t size_ = 0, payload_offset_ = 0, payload_bytes_ = 0;
  Mutex socket_mu_;
  Mutex mu_;
  std::vector<uint32_t> free_ ABSL_GUARDED_BY(mu_);
  std::vector<uint32_t> abandoned_ ABSL_GUARDED_BY(mu_);  // nobody waits for them any more
  uint32_t tail_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t sequence_ ABSL_GUARDED_BY(mu_) = 0;
  std::vector<absl::Time> deadlines_;  // by slot; of its waiter
};

absl::StatusOr<std::unique_ptr<Ring>> OpenRing(const RingOptions& options) {
  if (options.slots > ring::kMaxSlots || !std::has_single_bit(options.slots)) {
    return Invalid("slots: got ", options.slots, ", expected a power of two of at most ",
                   ring::kMaxSlots);
  }
  if (options.payload_bytes < 0) {
    return Invalid("payload_bytes: got ", options.payload_bytes, ", expected 0 or more");
  }
  if (options.timeout <= absl::ZeroDuration()) {
    return Invalid("timeout: got ", absl::FormatDuration(options.timeout),
                   ", expected more than 0");
  }
  AWQD_ASSIGN_OR_RETURN(const Credentials credentials,
                        Credentials::Read("unix:ring", options.security));
  auto ring = std::make_unique<MappedRing>(options);
  AWQD_RETURN_IF_ERROR(ring->Connect());
  AWQD_RETURN_IF_ERROR(ring->OpenMemory(credentials.authorization()));
  return ring;
}

absl::Status MappedRing::Connect() {
  const absl::string_view path = absl::StripPrefix(options_.path, "unix:");
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    return Invalid("path: got ", path.size(), " bytes, expected 1 to ",
                   sizeof(address.sun_path) - 1);
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  socket_ = UniqueFd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket_.ok() ||
      connect(socket_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
    return absl::UnavailableError(
        absl::StrCat("ring: cannot connect to \"", path, "\": ", strerror(errno)));
  }
  const timeval timeout = absl::ToTimeval(std::min(options_.timeout, absl::Hours(24)));
  setsockopt(socket_.get(), SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
  setsockopt(socket_.get(), SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout));
  return absl::OkStatus();
}

absl::Status MappedRing::OpenMemory(const std::string& authorization) {
  const ring::OpenBody open = {.version = ring::kVersion,
                               .slots = options_.slots,
                               .payload_bytes = static_cast<uint64_t>(options_.payload_bytes)};
  std::string body(reinterpret_cast<const char*>(&open), sizeof(open));
  body += authorization;
  UniqueFd fds[3];  // the last is the socket of events, which nobody here polls
  std::string answer;
  MutexLock socket_lock(&socket_mu_);
  AWQD_ASSIGN_OR_RETURN(const Frame opened, Exchange(ring::kOpen, 0, body, &answer, fds));
  if (!fds[0].ok() || !fds[1].ok() || opened.value < ring::kHeaderBytes) {
    return absl::InternalError("ring: the server sent no memory");
  }
  void* const base =
      mmap(nullptr, opened.value, PROT_READ | PROT_WRITE, MAP_SHARED, fds[0].get(), 0);
  if (base == MAP_FAILED) {
    return absl::ResourceExhaustedError(absl::StrCat("ring: mmap: ", strerror(errno)));
  }
  base_ = static_cast<char*>(base);
  size_ = static_cast<int64_t>(opened.value);
  event_ = std::move(fds[1]);
  const ring::Header& header = *this->header();
  if (header.magic != ring::kMagic || header.slots != options_.slots ||
      header.slot_bytes != sizeof(ring::Slot) ||
      header.payload_offset + header.payload_bytes != opened.value) {
    return absl::InternalError("ring: the memory is not as this client knows it");
  }
  payload_offset_ = static_cast<int64_t>(header.payload_offset);
  payload_bytes_ = static_cast<int64_t>(header.payload_bytes);
  deadlines_.resize(options_.slots);
  MutexLock lock(&mu_);
  for (uint32_t i = options_.slots; i > 0; --i) free_.push_back(i - 1);
  return absl::OkStatus();
}

absl::StatusOr<Frame> MappedRing::Exchange(uint32_t kind, uint64_t value, absl::string_view body,
                                           std::string* answer, UniqueFd* fds, int descriptor) {
  if (body.size() > ring::kMaxBodyBytes) {
    return Invalid("request: got ", body.size(), " bytes, expected at most ", ring::kMaxBodyBytes,
                   " of one that is prepared");
  }
  AWQD_RETURN_IF_ERROR(SendAll(
      socket_.get(), {.kind = kind, .bytes = static_cast<uint32_t>(body.size()), .value = value},
      body, descriptor));
  Frame frame;
  AWQD_RETURN_IF_ERROR(
      ReceiveAll(socket_.get(), reinterpret_cast<char*>(&frame), sizeof(frame), fds));
  if (frame.bytes > ring::kMaxBodyBytes) return absl::InternalError("ring: an answer too long");
  answer->resize(frame.bytes);
  AWQD_RETURN_IF_ERROR(ReceiveAll(socket_.get(), answer->data(), answer->size(), nullptr));
  if (frame.kind == ring::kOk) return frame;
  return absl::Status(static_cast<absl::StatusCode>(frame.value), *answer);
}

template <typename Request>
absl::StatusOr<RingPrepared> MappedRing::PrepareRequest(ring::Method method, Request request) {
  ClearContents(&request);
  return PrepareBytes(method, request.SerializeAsString());
}

absl::StatusOr<RingPrepared> MappedRing::PrepareChain(const std::vector<RingStep>& steps) {
  std::string bytes;
  for (const RingStep& step : steps) {
    // A number that does not fit is no step either.
    const auto narrow = [](uint32_t from) {
      return static_cast<uint16_t>(std::min<uint32_t>(from, UINT16_MAX));
    };
    const ring::ChainStep one = {
        .call = step.call.number, .x = narrow(step.x), .router = narrow(step.router)};
    bytes.append(reinterpret_cast<const char*>(&one), sizeof(one));
  }
  return PrepareBytes(ring::kChain, bytes);
}

absl::StatusOr<RingPrepared> MappedRing::PrepareBytes(ring::Method method,
                                                      const std::string& request) {
  std::string answer;
  MutexLock lock(&socket_mu_);
  AWQD_ASSIGN_OR_RETURN(const Frame frame, Exchange(ring::kPrepare, method, request, &answer));
  if (answer.size() != sizeof(ring::PreparedBody)) {
    return absl::InternalError(
        "ring: the answer to a prepared call is not as this client knows it");
  }
  ring::PreparedBody body;
  std::memcpy(&body, answer.data(), sizeof(body));
  return RingPrepared{.number = static_cast<uint32_t>(frame.value),
                      .x_bytes = body.x_bytes,
                      .y_bytes = body.y_bytes,
                      .ids_bytes = body.ids_bytes,
                      .router_bytes = body.router_bytes,
                      .scales_bytes = body.scales_bytes,
                      .y_columns = body.y_columns,
                      .y_dtype = static_cast<DType>(body.y_dtype)};
}

absl::Status MappedRing::Release(uint32_t number) {
  std::string answer;
  MutexLock lock(&socket_mu_);
  return Exchange(ring::kRelease, number, "", &answer).status();
}

absl::Status MappedRing::ShareMemory(const v1::ShareMemoryRequest& request, int descriptor) {
  std::string answer;
  MutexLock lock(&socket_mu_);
  return Exchange(ring::kShare, 0, request.SerializeAsString(), &answer, nullptr, descriptor)
      .status();
}

absl::Status MappedRing::UnshareMemory(absl::string_view region) {
  std::string answer;
  MutexLock lock(&socket_mu_);
  return Exchange(ring::kUnshare, 0, region, &answer).status();
}

bool MappedRing::server_gone() const {
  if (header()->closed.load() != 0) return true;
  // Only a prepared call's answer comes by the socket, so a peek finds nothing or the end.
  char byte;
  return recv(socket_.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0;
}

void MappedRing::CollectAbandoned() {
  std::erase_if(abandoned_, [this](uint32_t index) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    if (slot(index)->answer.state.load() != ring::kAnswered) return false;
    free_.push_back(index);
    return true;
  });
}

absl::StatusOr<uint32_t> MappedRing::Submit(const RingCall& call) {
  if (call.traceparent.size() > sizeof(ring::Request::traceparent)) {
    return Invalid("traceparent: got ", call.traceparent.size(), " bytes, expected at most ",
                   sizeof(ring::Request::traceparent));
  }
  const absl::Duration timeout =
      call.timeout == absl::ZeroDuration() ? options_.timeout : call.timeout;
  const bool no_deadline = timeout == absl::InfiniteDuration();
  if (header()->closed.load() != 0) return Gone("it stops, or this client broke its rules");
  uint32_t index = 0;
  {
    MutexLock lock(&mu_);
    if (free_.empty()) CollectAbandoned();
    if (free_.empty()) {
      return absl::ResourceExhaustedError(
          absl::StrCat("slots: all ", options_.slots, " of the ring are in flight"));
    }
    index = free_.back();
    free_.pop_back();
    ring::Slot& slot = *this->slot(index);
    slot.request = {.sequence = ++sequence_,
                    .call = call.call,
                    .tokens = call.tokens,
                    .deadline = no_deadline ? 0 : SteadyNs() + absl::ToInt64Nanoseconds(timeout),
                    .x_offset = call.x_offset,
                    .y_offset = call.y_offset,
                    .ids_offset = call.ids_offset,
                    .router_offset = call.router_offset,
                    .traceparent = {},
                    .scales_offset = call.scales_offset};
    std::copy(call.traceparent.begin(), call.traceparent.end(), slot.request.traceparent);
    deadlines_[index] = absl::Now() + timeout + kGrace;
    slot.answer.state.store(ring::kPending, std::memory_order_relaxed);
    header()->submissions[tail_ % options_.slots].store(index, std::memory_order_relaxed);
    header()->tail.store(++tail_);  // before the look at `sleeping`, in one order for both sides
  }
  if (header()->sleeping.load() != 0) eventfd_write(event_.get(), 1);
  return index;
}

RingAnswer MappedRing::Wait(uint32_t index) {
  ring::Answer& answer = slot(index)->answer;
  const absl::Time deadline = deadlines_[index];
  const auto give_up = [&](absl::Status status) {
    MutexLock lock(&mu_);
    abandoned_.push_back(index);
    return RingAnswer{.status = std::move(status)};
  };
  const int64_t spin_until = SteadyNs() + absl::ToInt64Nanoseconds(options_.spin);
  int polls = 0;
  while (answer.state.load() != ring::kAnswered) {
    if (++polls % 16 != 0 || SteadyNs() < spin_until) {
      Relax(polls);
      continue;
    }
    uint32_t pending = ring::kPending;
    if (!answer.state.compare_exchange_strong(pending, ring::kWaiting) &&
        pending == ring::kAnswered) {
      break;
    }
    const absl::Duration left = std::min(deadline - absl::Now(), kLookInterval);
    if (left <= absl::ZeroDuration()) {
      return give_up(absl::DeadlineExceededError("ring: the server did not answer in time"));
    }
    const timespec wait = absl::ToTimespec(left);
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&answer.state), FUTEX_WAIT, ring::kWaiting,
            &wait, nullptr, 0);
    if (answer.state.load() != ring::kAnswered && server_gone()) {
      return give_up(Gone("it stopped, or this client broke its rules"));
    }
  }
  // Durations, because they saturate: the memory may say anything.
  RingAnswer out = {
      .y_bytes = answer.y_bytes,
      .server_time = absl::Nanoseconds(answer.answered) - absl::Nanoseconds(answer.received)};
  const size_t bytes = std::min<size_t>(answer.text_bytes, ring::kMaxTextBytes);
  const size_t kernel = std::min<size_t>(answer.kernel_bytes, bytes);
  const absl::string_view text(answer.text, bytes);
  if (answer.status != 0) {
    out.status = absl::Status(static_cast<absl::StatusCode>(answer.status), text);
  } else {
    out.execution.set_kernel(std::string(text.substr(0, kernel)));
    out.execution.set_device(std::string(text.substr(kernel)));
    out.execution.set_path(static_cast<v1::Path>(answer.path));
    out.execution.set_batch_tokens(answer.batch_tokens);
    out.execution.set_batch_requests(answer.batch_requests);
    out.execution.set_queue_us(answer.queue_us);
    out.execution.set_compute_us(answer.compute_us);
  }
  MutexLock lock(&mu_);
  free_.push_back(index);
  return out;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Ring>> Ring::Open(const RingOptions& options) {
  return OpenRing(options);
}

RingAnswer Ring::Run(const RingCall& call) {
  const absl::StatusOr<uint32_t> index = Submit(call);
  if (!index.ok()) return {.status = index.status()};
  return Wait(*index);
}

}  // namespace awqd::client
