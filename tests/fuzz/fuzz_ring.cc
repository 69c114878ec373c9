// Fuzzes the memory of a ring: a client that writes anything anywhere between the server's steps.
// Whatever it writes, each call that starts ends once, ranges lie within the payload, and the answer
// is in the slot of its call.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "server/ring/chain.h"
#include "server/ring/ring.h"
#include "tests/fuzz/require.h"

namespace awqd::ring {
namespace {

using fuzz::Require;

constexpr uint32_t kSlots = 4;
constexpr uint64_t kPayload = 4096;

// Ends calls at once, or keeps them.
class FuzzedCall final : public Prepared {
 public:
  FuzzedCall(transport::Admission::Entry* entry, std::deque<std::shared_ptr<Call>>* held)
      : entry_(entry), held_(held) {}

  transport::Admission::Entry* entry() const override { return entry_; }
  const PreparedBody& body() const override { return body_; }
  std::optional<std::string> place() const override { return ""; }
  std::function<void()> Run(const std::shared_ptr<Call>& call) const override {
    const Request& request = call->request();
    for (const int64_t offset : {request.x_offset, request.y_offset, request.ids_offset,
                                 request.router_offset, request.scales_offset}) {
      const Memory& memory = *call->memory();
      char* const found = memory.FindPayload(offset, request.tokens);
      if (found == nullptr) continue;
      Require(found >= memory.payload());
      Require(found + request.tokens <= memory.payload() + memory.payload_bytes());
      std::memset(found, 1, static_cast<size_t>(request.tokens));
    }
    held_->push_back(call);
    if (request.sequence % 2 == 0) EndOldest(held_);
    return [] {};
  }

  static void EndOldest(std::deque<std::shared_ptr<Call>>* held) {
    if (held->empty()) return;
    const std::shared_ptr<Call> call = std::move(held->front());
    held->pop_front();
    call->outcome()->kernel = "fuzzed";
    call->outcome()->y_bytes = std::clamp(call->request().tokens, int64_t{0}, int64_t{kPayload});
    call->End(call->request().router_offset % 2 == 0
                  ? absl::OkStatus()
                  : absl::InternalError(std::string(2 * kMaxTextBytes, 'x')));
  }

 private:
  transport::Admission::Entry* const entry_;
  std::deque<std::shared_ptr<Call>>* const held_;
  // Any of its results is what any step of a chain takes.
  const PreparedBody body_ = {.x_bytes = 8,
                              .y_bytes = 8,
                              .ids_bytes = 4,
                              .router_bytes = 8,
                              .scales_bytes = 4,
                              .y_columns = 4,
                              .y_dtype = 1,
                              .x_dtype = 1,
                              .router_dtype = 1};
};

// Steps, until the bytes end or the ring does. A step is a byte that says which, and what it needs.
void RunSteps(const uint8_t* data, size_t size) {
  static transport::Admission admission;
  static auto* const empty = admission.AddMethod("awqd.ring.Ring/Empty", security::Need::kInfer);
  std::deque<std::shared_ptr<Call>> held;
  int ended = 0;
  {
    const auto memory = *Memory::Create(kSlots, kPayload);
    const auto ring = std::make_shared<Ring>(
        memory, &admission, empty,
        transport::RingClient{nullptr, std::make_shared<transport::Connection>()},
        std::shared_ptr<void>(nullptr, [&ended](void*) { ++ended; }));
    const uint32_t number = *ring->AddPrepared(std::make_shared<FuzzedCall>(empty, &held));
    bool open = true;
    for (size_t at = 0; open && at < size;) {
      const uint8_t step = data[at++];
      if (step < 64) {  // a client that means well, but for the fields
        const uint32_t tail = memory->header()->tail.load();
        const uint32_t slot = step % kSlots;
        Request request = {};
        std::memcpy(&request, data + at, std::min(sizeof(request), size - at));
        at += std::min(sizeof(request), size - at);
        if (step < 32) request.call = number;
        memory->slot(slot)->request = request;
        memory->header()->submissions[tail % kSlots].store(slot);
        memory->header()->tail.store(tail + 1);
      } else if (step < 128) {  // anything at any place before the payload
        uint64_t place = 0;
        std::memcpy(&place, data + at, std::min(sizeof(place), size - at));
        at += std::min<size_t>(3, size - at);
        const size_t bytes = std::min<size_t>(step % 16, size - at);
        place %= kHeaderBytes + kSlots * sizeof(Slot) - 16;
        std::memcpy(reinterpret_cast<char*>(memory->header()) + place, data + at, bytes);
        at += bytes;
      } else if (step < 192) {
        open = ring->TakeSubmissions().ok();
      } else if (step < 224) {
        FuzzedCall::EndOldest(&held);
      } else {  // a chain, if the bytes are one; it may become the call with the next number
        const size_t bytes = std::min(sizeof(ChainStep) * (step % 8), size - at);
        const absl::string_view steps(reinterpret_cast<const char*>(data) + at, bytes);
        const absl::StatusOr<PreparedPtr> chain = MakeChain(*ring, steps, empty);
        if (chain.ok()) {
          Require((*chain)->body().y_bytes == static_cast<int64_t>(bytes / sizeof(ChainStep) * 8));
          (void)ring->AddPrepared(*chain);
        }
        at += bytes;
      }
      Require(held.size() <= kSlots);
    }
    ring->Close();
  }
  Require(ended == (held.empty() ? 1 : 0));  // a ring lives as long as its calls
  while (!held.empty()) FuzzedCall::EndOldest(&held);
  Require(ended == 1);
  Require(admission.drain()->in_flight() == 0);
}

}  // namespace
}  // namespace awqd::ring

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  awqd::ring::RunSteps(data, size);
  return 0;
}
