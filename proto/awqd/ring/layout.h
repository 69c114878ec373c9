// The ring: how a client on the server's machine and the server share memory, and what they say
// over the UNIX socket that hands it out.
//
// The client connects to --ring_path and sends kOpen. The answer carries three descriptors: the
// memory (its size is sealed), an eventfd, and a socket of events. Over the first socket the client
// prepares calls: a request of awqd.v1 without its tensors becomes a number. The ring lives as long
// as the connection.
//
// To call, the client takes a free slot, writes its request there, sets Answer::state to
// kPending, writes the number of the slot to submissions[tail % slots], stores tail + 1, and then
// writes the eventfd if `sleeping` is not 0. The answer is there when Answer::state is kAnswered. A
// client that sleeps on the state as a futex says so by kWaiting. One that polls descriptors sets
// kPolling before it submits: then a byte comes by the socket of events, unless that is full, and
// its end when the ring is closed.
//
// The server copies a request before it reads it, and trusts nothing that a client can write. A
// client that breaks these rules loses its ring (`closed`); a bad value is an error in its slot.
// Numbers are little-endian, times are of CLOCK_MONOTONIC in nanoseconds.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace awqd::ring {

inline constexpr uint32_t kMagic = 0x71776172;  // "rawq"
inline constexpr uint32_t kVersion = 1;
// Slots of a ring: a power of two up to kMaxSlots.
inline constexpr uint32_t kMaxSlots = 512;
// Bytes of memory before the slots.
inline constexpr uint64_t kHeaderBytes = 4096;

using Word = std::atomic<uint32_t>;
static_assert(Word::is_always_lock_free && sizeof(Word) == 4);

// At the beginning of the memory. Words that one side writes have a cache line of their own.
struct Header {
  uint32_t magic;
  uint32_t version;
  uint32_t slots;
  uint32_t slot_bytes;
  uint64_t slots_offset;
  uint64_t payload_offset;
  uint64_t payload_bytes;
  uint8_t reserved0[24];
  Word sleeping;  // not 0: the server sleeps until the eventfd is written
  Word closed;    // not 0: nothing is answered any more
  uint8_t reserved1[56];
  Word tail;  // how many slots were submitted, modulo 2^32; the client's
  uint8_t reserved2[892];
  Word submissions[kMaxSlots];  // the client's
};

// The client writes it. Offsets count from the beginning of the payload, or of the shared-memory
// object that the prepared call names.
struct Request {
  uint64_t sequence;      // anything; the answer repeats it
  uint32_t call;          // the number of a prepared call; 0: the empty call
  uint32_t reserved;      // 0
  int64_t tokens;         // rows of the activations
  int64_t deadline;       // 0: none
  int64_t x_offset;       // of the activations, row-major
  int64_t y_offset;       // of the result; it may overlap the activations
  int64_t ids_offset;     // of the expert ids, INT32 [tokens, top_k]; of calls with experts
  int64_t router_offset;  // of the router weights or of a router's logits, of calls that have them
  // The caller's span, as the header traceparent, without a closing zero; empty: none.
  char traceparent[56];
  int64_t scales_offset;  // of the activation scales, FP32 [tokens], of calls that have them
};

enum State : uint32_t { kPending = 0, kAnswered = 1, kWaiting = 2, kPolling = 3 };

inline constexpr size_t kMaxTextBytes = 512;

// The server writes it, the state last.
struct Answer {
  Word state;
  uint32_t status;  // a google.rpc.Code
  uint64_t sequence;
  int64_t received;  // when the slot was read
  int64_t answered;
  int64_t queue_us;  // these and the following as Execution of awqd.v1
  int64_t compute_us;
  int64_t batch_tokens;
  int32_t batch_requests;
  uint32_t path;
  int64_t y_bytes;
  uint32_t kernel_bytes;  // of the text, before the device
  uint32_t text_bytes;
  // The kernel and then the device, or the error's message, cut.
  char text[kMaxTextBytes];
  uint8_t reserved[176];
};

struct Slot {
  Request request;
  uint8_t reserved[128];
  Answer answer;
};

static_assert(offsetof(Header, sleeping) == 64 && offsetof(Header, closed) == 68);
static_assert(offsetof(Header, tail) == 128 && offsetof(Header, submissions) == 1024);
static_assert(sizeof(Header) <= kHeaderBytes);
static_assert(offsetof(Request, tokens) == 16 && offsetof(Request, router_offset) == 56);
static_assert(offsetof(Request, traceparent) == 64 && offsetof(Request, scales_offset) == 120);
static_assert(sizeof(Request) == 128);
static_assert(offsetof(Slot, answer) == 256 && sizeof(Slot) == 1024);
static_assert(offsetof(Answer, text) == 80 && sizeof(Answer) == 768);

// --- Over the socket: a Frame, and a body of so many bytes. Each has one answer, in order. ---

enum FrameKind : uint32_t {
  kOpen = 1,     // body: OpenBody, then what a call shows as authorization, if anything
  kPrepare = 2,  // value: a Method; body: the request
  kRelease = 3,  // value: the number of a prepared call, which no call uses any more
  kOk = 4,  // to kOpen: value is the size of the memory, with the descriptors; to kPrepare: value
            // is the number, body PreparedBody
  kError = 5,  // value: a google.rpc.Code; body: the message
  kShare = 6,  // body: an awqd.v1.ShareMemoryRequest; unless the request has a handle, sent at once
               // with a descriptor of the memory (SCM_RIGHTS). The region lasts as long as the ring
  kUnshare = 7,  // body: the name of a region of this ring
};

// A chain is a call of several steps, which run in order and have one answer. Its body is a
// ChainStep for each. The results of all steps lie one after the other from y_offset on, those of
// each for all tokens. Steps with expert ids, router weights, logits or scales take those of the
// call, which has one of each. In a region of a GPU's memory tensors stay there between the steps.
enum Method : uint32_t {
  kQuantizedMatmul = 1,
  kGroupedQuantizedMatmul = 2,
  kGatedMlp = 3,
  kChain = 4,
};

struct ChainStep {
  uint32_t call;    // a prepared call; the tensors of all steps are in the payload or in one region
  uint16_t x;       // 0: the call's activations; i: the result of step i, from 1, an earlier one
  uint16_t router;  // the same of the router weights or logits
};
inline constexpr uint32_t kMaxChainSteps = 32;

struct Frame {
  uint32_t kind;
  uint32_t bytes;
  uint64_t value;
};

struct OpenBody {
  uint32_t version;
  uint32_t slots;
  uint64_t payload_bytes;
};

// Bytes that one token of a prepared call takes, and the form of its result. A call takes scales
// where the prepared request has activation_scales [1] without contents.
struct PreparedBody {
  int64_t x_bytes;
  int64_t y_bytes;
  int64_t ids_bytes;     // 0: no experts
  int64_t router_bytes;  // of router weights or logits; 0: none
  int64_t scales_bytes;  // 0: none
  int64_t y_columns;
  uint32_t y_dtype;  // awqd.v1.DType
  uint32_t x_dtype;
  uint32_t router_dtype;
  uint32_t reserved;
};

// A request that is prepared, at most.
inline constexpr uint32_t kMaxBodyBytes = 256 << 10;

}  // namespace awqd::ring
