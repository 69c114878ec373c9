// Memory: what one client and the server share: header, slots and payload, in a memfd of a sealed
// size; and how an answer wakes the client: by its futex or the socket of events.
//
// Attackers: a client that shortens the file under the server's mapping, which the seals prevent;
// and one that reads no events, for whom no send waits, whatever it makes of its end of the socket.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "awqd/ring/layout.h"
#include "kernels/base/unique_fd.h"

namespace awqd::ring {

// Whoever has the descriptor can write all of it at any time, so nothing that is read here is
// trusted, and nothing is read twice.
class Memory {
 public:
  // `slots` is a power of two up to kMaxSlots. RESOURCE_EXHAUSTED when the system refuses.
  static absl::StatusOr<std::shared_ptr<Memory>> Create(uint32_t slots, uint64_t payload_bytes);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  int fd() const { return fd_.get(); }
  // The client's end of the socket of events, once: it is sent, and closed here.
  UniqueFd TakeClientEvents() { return std::move(client_events_); }
  uint64_t size() const { return size_; }
  uint32_t slots() const { return slots_; }
  uint64_t payload_bytes() const { return payload_bytes_; }
  Header* header() const { return reinterpret_cast<Header*>(base_); }
  Slot* slot(uint32_t index) const { return reinterpret_cast<Slot*>(base_ + kHeaderBytes) + index; }
  char* payload() const { return base_ + size_ - payload_bytes_; }
  // Bytes [offset, offset + bytes) of the payload, whatever the numbers are; null when they do not
  // lie within it.
  char* FindPayload(int64_t offset, int64_t bytes) const {
    const auto size = static_cast<int64_t>(payload_bytes_);
    const bool within = offset >= 0 && bytes >= 0 && bytes <= size && offset <= size - bytes;
    return within ? payload() + offset : nullptr;
  }

  // A copy of the slot's request: one read of each word.
  Request ReadRequest(uint32_t index) const;
  // Shows an answer whose other fields are written, and wakes the client if it sleeps or polls.
  void ShowAnswer(uint32_t index) const;
  // Nothing is answered from here on. Wakes the client wherever it sleeps.
  void SetClosed() const;

 private:
  Memory(UniqueFd fd, UniqueFd events, UniqueFd client_events, char* base, uint64_t size,
         uint32_t slots, uint64_t payload_bytes);

  const UniqueFd fd_, events_;
  UniqueFd client_events_;
  char* const base_;
  const uint64_t size_;
  const uint32_t slots_;
  const uint64_t payload_bytes_;
};

}  // namespace awqd::ring
