// The memfd, its seals and its mapping.
#include "server/ring/memory.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <cerrno>
#include <climits>
#include <cstring>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"

namespace awqd::ring {
namespace {

constexpr uint64_t kPage = 4096;

absl::Status Refused(absl::string_view what) {
  return absl::ResourceExhaustedError(absl::StrCat("ring: ", what, ": ", strerror(errno)));
}

void WakeAll(Word* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

Memory::Memory(UniqueFd fd, UniqueFd events, UniqueFd client_events, char* base, uint64_t size,
               uint32_t slots, uint64_t payload_bytes)
    : fd_(std::move(fd)),
      events_(std::move(events)),
      client_events_(std::move(client_events)),
      base_(base),
      size_(size),
      slots_(slots),
      payload_bytes_(payload_bytes) {
  Header* const header = new (base_) Header();
  header->magic = kMagic;
  header->version = kVersion;
  header->slots = slots;
  header->slot_bytes = sizeof(Slot);
  header->slots_offset = kHeaderBytes;
  header->payload_offset = size_ - payload_bytes_;
  header->payload_bytes = payload_bytes_;
}

Memory::~Memory() { munmap(base_, size_); }

absl::StatusOr<std::shared_ptr<Memory>> Memory::Create(uint32_t slots, uint64_t payload_bytes) {
  const uint64_t rounded = (payload_bytes + kPage - 1) / kPage * kPage;
  const uint64_t slot_bytes = (slots * sizeof(Slot) + kPage - 1) / kPage * kPage;
  const uint64_t size = kHeaderBytes + slot_bytes + rounded;
  UniqueFd fd(memfd_create("awqd-ring", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.ok()) return Refused("memfd_create");
  if (ftruncate(fd.get(), static_cast<off_t>(size)) != 0) return Refused("ftruncate");
  if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return Refused("sealing");
  }
  int events[2] = {-1, -1};
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, events) != 0) return Refused("socketpair");
  UniqueFd own(events[0]), client(events[1]);
  void* const base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (base == MAP_FAILED) return Refused("mmap");
  return std::shared_ptr<Memory>(new Memory(std::move(fd), std::move(own), std::move(client),
                                            static_cast<char*>(base), size, slots, rounded));
}

Request Memory::ReadRequest(uint32_t index) const {
  static_assert(sizeof(Request) % sizeof(uint64_t) == 0);
  std::array<uint64_t, sizeof(Request) / sizeof(uint64_t)> words;
  const auto* const from = reinterpret_cast<const uint64_t*>(&slot(index)->request);
  for (size_t i = 0; i < words.size(); ++i) words[i] = __atomic_load_n(from + i, __ATOMIC_RELAXED);
  return std::bit_cast<Request>(words);
}

void Memory::ShowAnswer(uint32_t index) const {
  Word& state = slot(index)->answer.state;
  const uint32_t before = state.exchange(kAnswered);
  if (before == kWaiting) WakeAll(&state);
  // A full socket holds events that the client has yet to read, before it looks at the states.
  if (before == kPolling) send(events_.get(), "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
}

void Memory::SetClosed() const {
  header()->closed.store(1);
  shutdown(events_.get(), SHUT_RDWR);
  for (uint32_t i = 0; i < slots_; ++i) WakeAll(&slot(i)->answer.state);
}

}  // namespace awqd::ring
