// A message whose parts lie beside it.
#pragma once

#include <cstddef>

#include "google/protobuf/arena.h"

namespace awqd::wire {

// A message and, in the same object, memory for its strings, fields and messages. One whose parts
// fit allocates nothing and destroys nothing; more comes from the heap.
template <typename Message, size_t kBytes = 2048>
class LocalMessage {
 public:
  LocalMessage() = default;
  LocalMessage(const LocalMessage&) = delete;
  LocalMessage& operator=(const LocalMessage&) = delete;

  Message& operator*() { return message_; }
  const Message& operator*() const { return message_; }
  Message* operator->() { return &message_; }
  const Message* operator->() const { return &message_; }

 private:
#if defined(AWQD_THREAD_SANITIZER)
  // Map fields of Protocol Buffers 3.21 have members for ThreadSanitizer that its library, which
  // was compiled without, takes for the arena.
  Message message_;
#else
  alignas(std::max_align_t) char block_[kBytes];
  google::protobuf::Arena arena_{block_, kBytes};  // starts in the block
  Message& message_ = *Message::default_instance().New(&arena_);
#endif
};

}  // namespace awqd::wire
