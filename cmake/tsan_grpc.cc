// Part of every executable of a ThreadSanitizer build: shows the sanitizer the order that gRPC
// gives.
//
// Distributions build gRPC and Abseil without instrumentation, and their locks and reference counts
// are atomics and futexes, which the sanitizer sees only in code that it instruments. Unaided it
// takes everything that one thread hands to gRPC and another thread gets back for a race. The
// functions below are found before the libraries' own; each tells the sanitizer and calls the
// library's.
//
// All of gRPC is one sync object: what a thread did before it called gRPC happens before what any
// thread does after it was in gRPC. A race of ours is hidden only where both threads pass through
// gRPC in between; our own locks (kernels/base/mutex.h) are pthread's, which the sanitizer tells
// apart.
#include <dlfcn.h>
#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>
#include <grpc/grpc.h>
#include <grpc/slice.h>
#include <grpc/support/alloc.h>
#include <grpcpp/support/server_callback.h>

#include <cstdlib>
#include <cstring>

#include "absl/synchronization/mutex.h"

extern "C" void __tsan_acquire(void* address);
extern "C" void __tsan_release(void* address);

namespace {

char grpc_sync;

void Enter() { __tsan_release(&grpc_sync); }
void Leave() { __tsan_acquire(&grpc_sync); }

// Orders what its scope does after all that entered before, and before all that leaves later.
struct Crossing {
  Crossing() {
    Leave();
    Enter();
  }
  ~Crossing() {
    Leave();
    Enter();
  }
};

// The library's definition behind `own`, which is one of this file.
template <typename Function>
Function Library(Function own) {
  void* address = nullptr;
  std::memcpy(&address, &own, sizeof(address));
  Dl_info info;
  if (dladdr(address, &info) == 0 || info.dli_sname == nullptr) std::abort();
  address = dlsym(RTLD_NEXT, info.dli_sname);
  if (address == nullptr) std::abort();
  std::memcpy(&own, &address, sizeof(address));
  return own;
}

}  // namespace

#define AWQD_CROSSING(result, name, parameters, arguments) \
  result name parameters {                                 \
    static const auto library = Library(&name);            \
    Crossing crossing;                                     \
    return library arguments;                              \
  }

extern "C" {

// Memory that one thread of gRPC gives back may serve another thread next.
AWQD_CROSSING(void*, gpr_malloc, (size_t size), (size))
AWQD_CROSSING(void*, gpr_zalloc, (size_t size), (size))
AWQD_CROSSING(void*, gpr_realloc, (void* p, size_t size), (p, size))
AWQD_CROSSING(void, gpr_free, (void* p), (p))
AWQD_CROSSING(void*, gpr_malloc_aligned, (size_t size, size_t alignment), (size, alignment))
AWQD_CROSSING(void, gpr_free_aligned, (void* p), (p))

// Calls and their completions.
AWQD_CROSSING(grpc_call_error, grpc_call_start_batch,
              (grpc_call * call, const grpc_op* ops, size_t count, void* tag, void* reserved),
              (call, ops, count, tag, reserved))
AWQD_CROSSING(void*, grpc_call_arena_alloc, (grpc_call * call, size_t size), (call, size))
AWQD_CROSSING(void, grpc_call_ref, (grpc_call * call), (call))
AWQD_CROSSING(void, grpc_call_unref, (grpc_call * call), (call))
AWQD_CROSSING(grpc_event, grpc_completion_queue_next,
              (grpc_completion_queue * queue, gpr_timespec deadline, void* reserved),
              (queue, deadline, reserved))
AWQD_CROSSING(grpc_event, grpc_completion_queue_pluck,
              (grpc_completion_queue * queue, void* tag, gpr_timespec deadline, void* reserved),
              (queue, tag, deadline, reserved))

// Bytes of messages, counted by reference. Whichever thread of gRPC drops the last reference calls
// `destroy`, after what was handed to it by means that the sanitizer does not see.
grpc_slice grpc_slice_new_with_user_data(void* p, size_t size, void (*destroy)(void*), void* data) {
  struct Owned {
    void (*destroy)(void*);
    void* data;
  };
  static const auto library = Library(&grpc_slice_new_with_user_data);
  const auto drop = [](void* owned) {
    Crossing crossing;
    static_cast<Owned*>(owned)->destroy(static_cast<Owned*>(owned)->data);
    delete static_cast<Owned*>(owned);
  };
  Crossing crossing;
  return library(p, size, drop, new Owned{destroy, data});
}
AWQD_CROSSING(grpc_slice, grpc_slice_ref, (grpc_slice slice), (slice))
AWQD_CROSSING(void, grpc_slice_unref, (grpc_slice slice), (slice))
AWQD_CROSSING(void, grpc_byte_buffer_destroy, (grpc_byte_buffer * buffer), (buffer))
AWQD_CROSSING(int, grpc_byte_buffer_reader_init,
              (grpc_byte_buffer_reader * reader, grpc_byte_buffer* buffer), (reader, buffer))
AWQD_CROSSING(int, grpc_byte_buffer_reader_peek,
              (grpc_byte_buffer_reader * reader, grpc_slice** slice), (reader, slice))

}  // extern "C"

namespace grpc {
namespace internal {
namespace {

// Stands in for a reactor where gRPC cancels it: between OnCancel and OnDone gRPC only counts down
// an atomic.
class CancelCrossing : public ServerReactor {
 public:
  explicit CancelCrossing(ServerReactor* reactor) : reactor_(reactor) {}
  void OnDone() override {}
  void OnCancel() override {
    reactor_->OnCancel();
    Enter();
    delete this;
  }

 private:
  ServerReactor* const reactor_;
};

}  // namespace

void ServerCallbackCall::CallOnCancel(ServerReactor* reactor) {
  static const auto library = Library(&ServerCallbackCall::CallOnCancel);
  (this->*library)(reactor->InternalInlineable() ? reactor : new CancelCrossing(reactor));
}

void ServerCallbackCall::ScheduleOnDone(bool inline_ondone) {
  static const auto library = Library(&ServerCallbackCall::ScheduleOnDone);
  Crossing crossing;
  (this->*library)(inline_ondone);
}

}  // namespace internal
}  // namespace grpc

namespace absl {
ABSL_NAMESPACE_BEGIN

void Mutex::Lock() {
  static const auto library = Library(&Mutex::Lock);
  (this->*library)();
  Leave();
}

bool Mutex::TryLock() {
  static const auto library = Library(&Mutex::TryLock);
  const bool locked = (this->*library)();
  Leave();
  return locked;
}

void Mutex::Unlock() {
  static const auto library = Library(&Mutex::Unlock);
  Enter();
  (this->*library)();
}

void CondVar::Wait(Mutex* mu) {
  static const auto library = Library(static_cast<void (CondVar::*)(Mutex*)>(&CondVar::Wait));
  Crossing crossing;
  (this->*library)(mu);
}

bool CondVar::WaitWithTimeout(Mutex* mu, absl::Duration timeout) {
  static const auto library = Library(&CondVar::WaitWithTimeout);
  Crossing crossing;
  return (this->*library)(mu, timeout);
}

bool CondVar::WaitWithDeadline(Mutex* mu, absl::Time deadline) {
  static const auto library = Library(&CondVar::WaitWithDeadline);
  Crossing crossing;
  return (this->*library)(mu, deadline);
}

ABSL_NAMESPACE_END
}  // namespace absl
