// Calls by rings, over a fake engine: what the engine sees and the client gets, and clients that
// lie, overwrite, die or stay silent.
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>
#include <thread>

#include "awqd/ring/layout.h"
#include "client/ring.h"
#include "tests/server/services/rpc_fixture.h"
#include "tests/server/services/shared_object.h"

namespace awqd::services {
namespace {

using client::MatmulCall;
using client::RingAnswer;
using client::RingCall;
using client::RingPrepared;
using client::WeightName;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kX = 256, kY = 32;  // bytes of a token of "layer"

class RingsTest : public RpcTest {
 protected:
  void Configure(Options* options) override {
    path_ = (root_ / "ring.sock").string();
    options->ring.path = path_;
    options->shared_memory = {.prefixes = {"awqd-rings-"}};
    options->ring.spin = absl::Microseconds(20);
    options->ring.threads = 2;
    options->ring.max_rings = 6;
    options->ring.max_rings_per_client = 4;
    options->ring.max_bytes = 1 << 20;
    options->in_flight_bytes = 8 << 20;
    options->transport.handshake_timeout = absl::Milliseconds(300);
  }

  void TearDown() override {
    ring_.reset();
    if (server_ != nullptr) {
      EXPECT_TRUE(Eventually([&] { return Stats().rings == 0; }));
      EXPECT_TRUE(Eventually([&] { return server_->in_flight_bytes() == 0; }));
    }
    RpcTest::TearDown();
  }

  obs::RingStats Stats() const { return *server_->Snapshot(Plans::kLeftOut).rings; }

  absl::StatusOr<std::unique_ptr<client::Ring>> Open(uint32_t slots = 8, int64_t bytes = 64 << 10) {
    return client::Ring::Open({.path = "unix:" + path_,
                               .slots = slots,
                               .payload_bytes = bytes,
                               .timeout = absl::Seconds(10)});
  }
  // Opens ring_, and prepares products with "layer".
  void OpenPrepared(uint32_t slots = 8) {
    auto ring = Open(slots);
    ASSERT_TRUE(ring.ok()) << ring.status();
    ring_ = *std::move(ring);
    const auto prepared = ring_->Prepare(Product());
    ASSERT_TRUE(prepared.ok()) << prepared.status();
    layer_ = *prepared;
  }

  static MatmulCall Product() {
    return {.weight = WeightName{"tiny", "layer"},
            .activations = {v1::FP16, {1, 128}, ""},
            .priority = 3};
  }
  RingCall CallOf(int64_t tokens = 1) const {
    return {.call = layer_.number, .tokens = tokens, .x_offset = 4096, .y_offset = 0};
  }
  void ExpectRefused(const RingCall& call, absl::StatusCode code, const std::string& text) {
    const RingAnswer answer = ring_->Run(call);
    EXPECT_EQ(answer.status.code(), code) << answer.status;
    EXPECT_THAT(std::string(answer.status.message()), HasSubstr(text));
  }
  // How many calls by rings have ended with the code.
  int64_t Ended(const std::string& method, absl::StatusCode code) const {
    for (const obs::MethodStats& calls : server_->admission()->Calls()) {
      if (calls.method == method) return calls.durations_ns[static_cast<int>(code)].total();
    }
    return -1;
  }

  // A connection of a client of our own, with these bytes sent.
  UniqueFd Connect(const std::string& bytes = "") const {
    UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un address = {.sun_family = AF_UNIX};
    std::strncpy(address.sun_path, path_.c_str(), sizeof(address.sun_path) - 1);
    EXPECT_EQ(connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    if (!bytes.empty()) {
      EXPECT_EQ(send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
                static_cast<ssize_t>(bytes.size()));
    }
    return fd;
  }
  // All that comes until the end of the connection.
  static std::string ReadToEnd(const UniqueFd& fd) {
    std::string all;
    char bytes[4096];
    for (;;) {
      const ssize_t got = recv(fd.get(), bytes, sizeof(bytes), 0);
      if (got <= 0) return all;
      all.append(bytes, static_cast<size_t>(got));
    }
  }
  template <typename Body>
  static std::string FrameOf(uint32_t kind, const Body& body) {
    const ring::Frame frame = {.kind = kind, .bytes = sizeof(Body), .value = 0};
    std::string out(reinterpret_cast<const char*>(&frame), sizeof(frame));
    return out.append(reinterpret_cast<const char*>(&body), sizeof(body));
  }
  // After a client broke the rules: its ring is closed, and others go on. The thread may sleep, but
  // whoever asks for another ring wakes it.
  void ExpectBroken() {
    const auto other = Open();
    EXPECT_TRUE(Eventually([&] { return Stats().broken == 1; }));
    EXPECT_EQ(ring_->Run({}).status.code(), absl::StatusCode::kUnavailable);
    EXPECT_TRUE(Eventually([&] { return Stats().rings == 1; }));
    OpenPrepared();
    EXPECT_TRUE(ring_->Run(CallOf()).status.ok());
  }

  SharedObject object_{"awqd-rings-" + std::to_string(getpid()), std::string(8192, 'o')};
  std::string path_;
  std::unique_ptr<client::Ring> ring_;
  RingPrepared layer_;
};

TEST_F(RingsTest, TheEngineSeesTheTokensAndTheAnswerLiesInTheRing) {
  OpenPrepared();
  EXPECT_EQ(layer_.x_bytes, kX);
  EXPECT_EQ(layer_.y_bytes, kY);
  EXPECT_EQ(layer_.y_columns, 16);
  EXPECT_EQ(layer_.y_dtype, v1::FP16);
  std::string bytes(2 * kX, '\0');
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 7);
  std::memset(ring_->payload(), 'o', 4096);
  std::memcpy(ring_->payload() + 4096, bytes.data(), bytes.size());
  RingCall call = CallOf(2);
  call.timeout = absl::Seconds(5);
  const RingAnswer answer = ring_->Run(call);
  ASSERT_TRUE(answer.status.ok()) << answer.status;
  EXPECT_EQ(engine_.last_matmul().x.view(), bytes);
  EXPECT_EQ(engine_.last_options().priority, 3);
  EXPECT_LT(engine_.last_options().deadline, absl::Now() + absl::Seconds(6));
  EXPECT_GT(engine_.last_options().deadline, absl::Now() + absl::Seconds(3));
  EXPECT_EQ(answer.y_bytes, 2 * kY);
  EXPECT_EQ(answer.execution.kernel(), "fake");
  EXPECT_EQ(std::string(ring_->payload(), 2 * kY + 1), std::string(2 * kY, '\0') + "o");
  EXPECT_EQ(Ended("awqd.ring.QuantizedInference/QuantizedMatmul", absl::StatusCode::kOk), 1);
}

TEST_F(RingsTest, AnEmptyCallIsCounted) {
  OpenPrepared();
  EXPECT_TRUE(ring_->Run({}).status.ok());
  EXPECT_EQ(Ended("awqd.ring.Ring/Empty", absl::StatusCode::kOk), 1);
  EXPECT_EQ(engine_.submitted(), 0);
  EXPECT_EQ(Stats().rings, 1);
}

TEST_F(RingsTest, WrongValuesNameTheirFields) {
  OpenPrepared();
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  RingCall call = CallOf();
  call.call = 77;
  ExpectRefused(call, absl::StatusCode::kNotFound, "call: got 77, expected");
  ExpectRefused(CallOf(-1), kInvalid, "tokens: got -1, expected 0 or more");
  ExpectRefused(CallOf(int64_t{1} << 60), kInvalid, "tokens: got");
  ExpectRefused(CallOf(int64_t{1} << 40), kInvalid, "x_offset: got 4096 for");
  for (const int64_t offset : {int64_t{-1}, int64_t{64 << 10}, INT64_MAX, INT64_MIN}) {
    call = CallOf();
    call.x_offset = offset;
    ExpectRefused(call, kInvalid, absl::StrCat("x_offset: got ", offset, " for 256 bytes"));
    call = CallOf();
    call.y_offset = offset;
    ExpectRefused(call, kInvalid, absl::StrCat("y_offset: got ", offset, " for 32 bytes"));
  }
  engine_.Refuse(absl::ResourceExhaustedError("full"));
  ExpectRefused(CallOf(), absl::StatusCode::kResourceExhausted, "full");
  EXPECT_EQ(engine_.submitted(), 0);
}

TEST_F(RingsTest, TensorsInSharedMemoryObjects) {
  OpenPrepared();
  std::string bytes(kX, '\0');
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 5);
  object_.Set(512, bytes);
  MatmulCall product = Product();
  product.shared_activations = object_.Range(0, 0);
  product.shared_output = object_.Range(0, 0);
  layer_ = *ring_->Prepare(product);
  RingCall call = CallOf();
  call.x_offset = 512;
  call.y_offset = 64;
  const RingAnswer answer = ring_->Run(call);
  ASSERT_TRUE(answer.status.ok()) << answer.status;
  EXPECT_EQ(engine_.last_matmul().x.view(), bytes);
  EXPECT_EQ(object_.Get(63, kY + 2), "o" + std::string(kY, '\0') + "o");
  call.x_offset = 8000;
  ExpectRefused(call, absl::StatusCode::kInvalidArgument, "activations.shared_memory");
  EXPECT_TRUE(Eventually([&] { return server_->open_shared_ranges() == 0; }));
}

TEST_F(RingsTest, ScalesAreOfEachTokenOrOfAllCalls) {
  OpenPrepared();
  MatmulCall product = Product();
  product.activations.dtype = v1::INT8;
  product.activation_scales = client::Tensor{v1::FP32, {1}, ""};
  layer_ = *ring_->Prepare(product);
  EXPECT_EQ(layer_.x_bytes, 128);
  EXPECT_EQ(layer_.scales_bytes, 4);
  const float scales[] = {0.5f, 2, -1};
  std::memcpy(ring_->payload() + 1000, scales, sizeof(scales));
  RingCall call = CallOf(2);
  call.scales_offset = 1000;
  EXPECT_TRUE(ring_->Run(call).status.ok());
  EXPECT_EQ(engine_.last_matmul().scales, (std::vector<float>{0.5f, 2}));
  call.tokens = 3;
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  ExpectRefused(call, kInvalid, "activation_scales: got -1 at element 2, expected positive");
  for (const int64_t offset : {int64_t{-1}, int64_t{(64 << 10) - 8}, INT64_MAX, INT64_MIN}) {
    call.scales_offset = offset;
    ExpectRefused(call, kInvalid, absl::StrCat("scales_offset: got ", offset, " for 12 bytes"));
  }
  product.activation_scales->bytes.assign(reinterpret_cast<const char*>(scales), 4);
  layer_ = *ring_->Prepare(product);
  EXPECT_EQ(layer_.scales_bytes, 0);
  EXPECT_TRUE(ring_->Run(CallOf(3)).status.ok());
  EXPECT_EQ(engine_.last_matmul().scales, (std::vector<float>{0.5f}));
}

// As event loops wait: for a byte of the socket of events, and for its end.
TEST_F(RingsTest, APollingClientGetsAnEventForEachAnswer) {
  const UniqueFd fd = Connect(FrameOf(ring::kOpen, ring::OpenBody{1, 8, 4096}));
  ring::Frame opened;
  iovec part = {&opened, sizeof(opened)};
  alignas(cmsghdr) char control[CMSG_SPACE(3 * sizeof(int))] = {};
  msghdr message = {
      .msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control)};
  ASSERT_EQ(recvmsg(fd.get(), &message, MSG_CMSG_CLOEXEC), sizeof(opened));
  int fds[3];
  std::memcpy(fds, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(fds));
  const UniqueFd memory(fds[0]), event(fds[1]), events(fds[2]);
  void* const base =
      mmap(nullptr, opened.value, PROT_READ | PROT_WRITE, MAP_SHARED, memory.get(), 0);
  ASSERT_NE(base, MAP_FAILED);
  auto* const header = static_cast<ring::Header*>(base);
  auto* const slots = reinterpret_cast<ring::Slot*>(static_cast<char*>(base) + ring::kHeaderBytes);
  const auto submit = [&](uint32_t slot) {
    slots[slot].answer.state = ring::kPolling;
    header->submissions[header->tail % 8] = slot;
    header->tail += 1;
    if (header->sleeping != 0) eventfd_write(event.get(), 1);
  };
  char byte;
  for (uint32_t slot = 0; slot < 8; ++slot) {
    submit(slot);
    EXPECT_EQ(recv(events.get(), &byte, 1, 0), 1);
    EXPECT_EQ(slots[slot].answer.state, ring::kAnswered);
  }
  // Events that nobody reads hold up nobody: the socket is full after some hundreds.
  for (int i = 0; i < 3000; ++i) {
    submit(i % 8);
    while (slots[i % 8].answer.state != ring::kAnswered) std::this_thread::yield();
  }
  OpenPrepared();
  EXPECT_TRUE(ring_->Run(CallOf()).status.ok());
  int64_t unread = 0;
  while (recv(events.get(), &byte, 1, MSG_DONTWAIT) == 1) ++unread;
  EXPECT_GT(unread, 0);
  EXPECT_LT(unread, 3000);
  header->tail += 1000;  // against the rules: its end comes by this socket too
  eventfd_write(event.get(), 1);
  EXPECT_EQ(recv(events.get(), &byte, 1, 0), 0);
  munmap(base, opened.value);
}

TEST_F(RingsTest, NoTokensAreAnAnswer) {
  OpenPrepared();
  const RingAnswer answer = ring_->Run(CallOf(0));
  EXPECT_TRUE(answer.status.ok()) << answer.status;
  EXPECT_EQ(answer.y_bytes, 0);
}

TEST_F(RingsTest, OnlyWhatCanRunIsPrepared) {
  OpenPrepared();
  const auto refused = [&](const MatmulCall& call, absl::StatusCode code, const std::string& text) {
    const auto prepared = ring_->Prepare(call);
    EXPECT_EQ(prepared.status().code(), code) << prepared.status();
    EXPECT_THAT(std::string(prepared.status().message()), HasSubstr(text));
  };
  MatmulCall call = Product();
  call.weight = WeightName{"tiny", "none"};
  refused(call, absl::StatusCode::kNotFound, "none");
  call.weight = v1::PackedWeight();
  refused(call, absl::StatusCode::kInvalidArgument, "packed: got a weight, expected none");
  call = Product();
  call.activations.shape = {1, 100};
  refused(call, absl::StatusCode::kInvalidArgument, "activations.shape");
  call.activations.shape = {};
  refused(call, absl::StatusCode::kInvalidArgument, "activations.shape");
  call = Product();
  call.activations.dtype = v1::INT32;
  refused(call, absl::StatusCode::kInvalidArgument, "activations.dtype");
  call = Product();
  call.bias = client::Tensor{v1::FP16, {3}, "123456"};
  refused(call, absl::StatusCode::kInvalidArgument, "bias.shape");
  call = Product();
  call.request_id = std::string(300 << 10, 'x');
  refused(call, absl::StatusCode::kInvalidArgument, "request: got 3");
  call = Product();
  call.activation_scales = client::Tensor{v1::FP32, {1}, ""};
  refused(call, absl::StatusCode::kInvalidArgument,
          "activation_scales: got a tensor, expected none");
  call.activations.dtype = v1::INT8;
  call.activation_scales->shape = {3};
  refused(call, absl::StatusCode::kInvalidArgument, "activation_scales");
  call.activation_scales = client::Tensor{v1::FP16, {1}, ""};
  refused(call, absl::StatusCode::kInvalidArgument, "activation_scales.dtype");
  client::GroupedMatmulCall routed;
  routed.stack = WeightName{"tiny", "w"};
  routed.activations = Product().activations;
  routed.router = client::Router{.logits = {v1::FP32, {1, 4}, ""}, .top_k = 9};
  const auto refused_routed = [&](const std::string& text) {
    EXPECT_THAT(std::string(ring_->Prepare(routed).status().message()), HasSubstr(text));
  };
  refused_routed("router.top_k: got 9, expected 1 to 4");
  // A client does not choose what is allocated.
  routed.router->logits.shape = {1, int64_t{1} << 40};
  refused_routed("router.logits.shape: got 4398046511104 bytes for each token, expected at most");
  routed.router.reset();
  routed.routing.expert_ids = {v1::INT32, {1, int64_t{1} << 40}, ""};
  refused_routed("expert_ids.shape: got 4398046511104 bytes for each token, expected at most");
  EXPECT_TRUE(ring_->Run(CallOf()).status.ok());
}

TEST_F(RingsTest, PreparedCallsAreBoundedAndCanBeReleased) {
  OpenPrepared();
  EXPECT_TRUE(Eventually([&] { return Stats().prepared_calls == 1; }));
  for (size_t i = 1; i < ring::Ring::kMaxPrepared; ++i) {
    ASSERT_TRUE(ring_->Prepare(Product()).ok());
  }
  EXPECT_THAT(std::string(ring_->Prepare(Product()).status().message()),
              HasSubstr("prepared calls: got one more, expected at most 1024"));
  EXPECT_TRUE(ring_->Release(7).ok());
  EXPECT_EQ(ring_->Release(7).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ring_->Release(0).code(), absl::StatusCode::kNotFound);
  RingCall call = CallOf();
  call.call = 7;
  ExpectRefused(call, absl::StatusCode::kNotFound, "call: got 7");
  EXPECT_EQ(ring_->Prepare(Product())->number, 7u);
}

TEST_F(RingsTest, StepsOfAChainRunInOrder) {
  OpenPrepared();
  MatmulCall product = Product();
  product.weight = WeightName{"tiny", "wide"};
  const RingPrepared wide = *ring_->Prepare(product);
  const auto chain = ring_->PrepareChain({{layer_}, {wide}, {layer_}});
  ASSERT_TRUE(chain.ok()) << chain.status();
  EXPECT_EQ(chain->x_bytes, kX);
  EXPECT_EQ(chain->y_bytes, 2 * kY + wide.y_bytes);
  EXPECT_TRUE(ring_->Release(wide.number).ok());
  layer_ = *chain;
  engine_.Hold(true);
  const auto slot = ring_->Submit(CallOf(2));
  for (int step = 0; step < 3; ++step) {
    ASSERT_TRUE(Eventually([&] { return engine_.held() == 1; }));
    EXPECT_EQ(engine_.submitted(), step + 1);
    engine_.Answer();
  }
  const RingAnswer answer = ring_->Wait(*slot);
  ASSERT_TRUE(answer.status.ok()) << answer.status;
  EXPECT_EQ(answer.y_bytes, 2 * chain->y_bytes);
  EXPECT_EQ(answer.execution.kernel(), "fake,fake,fake");
  EXPECT_EQ(Ended("awqd.ring.QuantizedInference/Chain", absl::StatusCode::kOk), 1);
  engine_.Hold(false);
  EXPECT_TRUE(ring_->Run(CallOf(2)).status.ok());
  EXPECT_EQ(engine_.submitted(), 6);
}

TEST_F(RingsTest, AStepThatFailsEndsTheChain) {
  OpenPrepared();
  layer_ = *ring_->PrepareChain({{layer_}, {layer_}});
  engine_.Fail(absl::ResourceExhaustedError("no"));
  ExpectRefused(CallOf(), absl::StatusCode::kResourceExhausted, "step 1: no");
  engine_.Fail(absl::OkStatus());
  RingCall call = CallOf();
  call.y_offset = (64 << 10) - kY;  // room for one result
  ExpectRefused(call, absl::StatusCode::kInvalidArgument, "step 2: y_offset: got");
  call.y_offset = INT64_MAX;
  ExpectRefused(call, absl::StatusCode::kInvalidArgument, "step 1: y_offset: got");
  ExpectRefused(CallOf(int64_t{1} << 60), absl::StatusCode::kInvalidArgument, "step 1: tokens");
}

TEST_F(RingsTest, TheChainOfAClientThatHasGoneEndsWithItsStep) {
  OpenPrepared();
  layer_ = *ring_->PrepareChain({{layer_}, {layer_}});
  engine_.Hold(true);
  ASSERT_TRUE(ring_->Submit(CallOf()).ok());
  ASSERT_TRUE(Eventually([&] { return engine_.held() == 1; }));
  ring_.reset();
  EXPECT_TRUE(Eventually([&] { return engine_.cancels() == 1; }));
  engine_.Answer();
  EXPECT_TRUE(Eventually([&] { return Stats().rings == 0; }));
  EXPECT_EQ(engine_.submitted(), 1);
}

TEST_F(RingsTest, ChainsThatCannotBe) {
  OpenPrepared();
  const auto refused = [&](const std::vector<client::RingStep>& steps, const std::string& text) {
    const absl::Status status = ring_->PrepareChain(steps).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
  };
  refused({}, "steps: got 0 bytes, expected 8 for each of 1 to 32");
  refused(std::vector<client::RingStep>(33, {layer_}), "steps: got 264 bytes");
  refused({{RingPrepared{.number = 9}}}, "steps[0].call: got 9, expected a prepared call");
  refused({{layer_, 1}}, "steps[0].x: got 1, expected an earlier step");
  refused({{layer_}, {layer_, 1}}, "steps[1].x: got 32 bytes a token of type 1, expected 256");
  refused({{layer_, 0, 1}}, "steps[0].router: got 1, expected an earlier step");
  refused({{layer_}, {layer_, 0, 1}},
          "steps[1].router: got 32 bytes a token of type 1, expected 0");
  MatmulCall product = Product();
  product.activations.dtype = v1::FP32;
  refused({{layer_}, {*ring_->Prepare(product)}},
          "steps[1].x: got 256 bytes a token of type 1, expected 512 of type 3");
  const RingPrepared chain = *ring_->PrepareChain({{layer_}});
  refused({{chain}}, absl::StrCat("steps[0].call: got ", chain.number));
}

TEST_F(RingsTest, AFullRingRefusesInTheClient) {
  OpenPrepared(2);
  engine_.Hold(true);
  const auto first = ring_->Submit(CallOf()), second = ring_->Submit(CallOf());
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_THAT(std::string(ring_->Submit(CallOf()).status().message()),
              HasSubstr("slots: all 2 of the ring are in flight"));
  EXPECT_TRUE(Eventually([&] { return engine_.held() == 2; }));
  engine_.Answer(1);
  EXPECT_TRUE(ring_->Wait(*second).status.ok());
  EXPECT_TRUE(ring_->Submit(CallOf()).ok());
  EXPECT_TRUE(Eventually([&] { return engine_.held() == 2; }));
  engine_.Answer();
  engine_.Answer();
}

TEST_F(RingsTest, DeadlinesHold) {
  OpenPrepared();
  RingCall call = CallOf();
  call.timeout = absl::Nanoseconds(1);
  ExpectRefused(call, absl::StatusCode::kDeadlineExceeded, "deadline");
  EXPECT_EQ(engine_.submitted(), 0);
  engine_.Hold(true);
  call.timeout = absl::Milliseconds(20);
  const absl::Time start = absl::Now();
  EXPECT_EQ(ring_->Run(call).status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
  engine_.Answer();  // too late, into a slot that nobody waits for
  engine_.Hold(false);
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(ring_->Run(CallOf()).status.ok());
}

TEST_F(RingsTest, AStoppingServerAnswersWhatIsInFlight) {
  OpenPrepared();
  engine_.Hold(true);
  const auto slot = ring_->Submit(CallOf());
  ASSERT_TRUE(slot.ok());
  ASSERT_TRUE(Eventually([&] { return engine_.held() == 1; }));
  std::thread stop([&] { server_->Shutdown(absl::Seconds(30)); });
  absl::Status later;
  while (later.ok()) later = ring_->Run({}).status;
  EXPECT_EQ(later.code(), absl::StatusCode::kUnavailable) << later;
  EXPECT_THAT(std::string(later.message()), HasSubstr("draining"));
  engine_.Answer();
  EXPECT_TRUE(ring_->Wait(*slot).status.ok());
  stop.join();
  EXPECT_EQ(ring_->Run({}).status.code(), absl::StatusCode::kUnavailable);
  server_ = nullptr;
}

TEST_F(RingsTest, AServerThatStopsAtItsDeadlineWithdrawsTheRest) {
  OpenPrepared();
  engine_.Hold(true);
  const auto slot = ring_->Submit(CallOf());
  ASSERT_TRUE(Eventually([&] { return engine_.held() == 1; }));
  std::thread answer([&] {
    EXPECT_TRUE(Eventually([&] { return engine_.cancels() == 1; }));
    engine_.Answer();
  });
  server_->Shutdown(absl::Milliseconds(100));
  answer.join();
  EXPECT_FALSE(ring_->Wait(*slot).status.ok());
  server_ = nullptr;
}

TEST_F(RingsTest, TheCallsOfAClientThatHasGoneAreWithdrawn) {
  OpenPrepared();
  engine_.Hold(true);
  ASSERT_TRUE(ring_->Submit(CallOf()).ok());
  ASSERT_TRUE(ring_->Submit(CallOf()).ok());
  ASSERT_TRUE(Eventually([&] { return engine_.held() == 2; }));
  ring_.reset();
  EXPECT_TRUE(Eventually([&] { return engine_.cancels() == 2; }));
  EXPECT_EQ(Stats().rings, 1);  // its memory lives as long as its calls
  engine_.Answer();
  engine_.Answer();
  EXPECT_TRUE(Eventually([&] { return Stats().rings == 0; }));
}

TEST_F(RingsTest, ATailThatJumpsEndsTheRing) {
  OpenPrepared();
  ring_->header()->tail += 1000;
  ExpectBroken();
}

TEST_F(RingsTest, ASlotThatIsNotThereEndsTheRing) {
  OpenPrepared();
  for (ring::Word& submission : ring_->header()->submissions) submission = 8;
  ring_->header()->tail += 1;
  ExpectBroken();
}

TEST_F(RingsTest, ASlotThatIsInFlightEndsTheRing) {
  OpenPrepared();
  engine_.Hold(true);
  const auto slot = ring_->Submit(CallOf());
  ASSERT_TRUE(Eventually([&] { return engine_.held() == 1; }));
  engine_.Hold(false);
  ring_->header()->submissions[1] = *slot;
  ring_->header()->tail += 1;
  (void)Open();
  EXPECT_TRUE(Eventually([&] { return engine_.cancels() == 1; }));
  engine_.Answer();
  ExpectBroken();
}

TEST_F(RingsTest, SlotsThatAreOverwrittenWhileTheyAreRead) {
  OpenPrepared(64);
  // A mapping of its own, as another process has one.
  constexpr size_t kBytes = ring::kHeaderBytes + 64 * sizeof(ring::Slot);
  void* const alias = mremap(ring_->header(), 0, kBytes, MREMAP_MAYMOVE);
  ASSERT_NE(alias, MAP_FAILED);
  char* const slots = static_cast<char*>(alias) + ring::kHeaderBytes;
  std::atomic<bool> stop{false};
  std::thread scribbler([&] {
    uint64_t random = 88172645463325252u;
    while (!stop) {
      random ^= random << 13, random ^= random >> 7, random ^= random << 17;
      auto* const words = reinterpret_cast<uint64_t*>(slots + random % 64 * sizeof(ring::Slot));
      // Also its answer but the state, which the client waits for.
      const uint64_t word = random >> 8 & 127;
      if (word * 8 == offsetof(ring::Slot, answer)) continue;
      __atomic_store_n(words + word, random >> (random & 63), __ATOMIC_RELAXED);
    }
  });
  for (int i = 0; i < 3000; ++i) (void)ring_->Run(CallOf());
  stop = true;
  scribbler.join();
  munmap(alias, kBytes);
  // Slots may have kept deadlines far away, but each call is written anew.
  for (int i = 0; i < 100; ++i) EXPECT_TRUE(ring_->Run(CallOf()).status.ok());
  EXPECT_EQ(Stats().broken, 0);
}

TEST_F(RingsTest, ManyCallersShareARing) {
  OpenPrepared(64);
  std::vector<std::thread> callers;
  std::atomic<int> good{0};
  for (int i = 0; i < 8; ++i) {
    callers.emplace_back([&] {
      for (int j = 0; j < 200; ++j) good += ring_->Run(CallOf(1 + j % 3)).status.ok();
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(good, 1600);
  EXPECT_EQ(engine_.submitted(), 1600);
}

TEST_F(RingsTest, RingsAreLimited) {
  std::vector<std::unique_ptr<client::Ring>> rings;
  for (int i = 0; i < 4; ++i) rings.push_back(*Open());
  const auto more = Open();
  EXPECT_EQ(more.status().code(), absl::StatusCode::kResourceExhausted) << more.status();
  EXPECT_THAT(
      std::string(more.status().message()),
      AllOf(HasSubstr("rings: got one more than the 4"), HasSubstr("max_rings_per_client")));
  rings.pop_back();
  EXPECT_TRUE(Eventually([&] { return Open().ok(); }));
  rings.clear();
  EXPECT_TRUE(Eventually([&] { return Stats().rings == 0; }));
  EXPECT_THAT(std::string(Open(8, 2 << 20).status().message()),
              HasSubstr("payload_bytes: got 2097152, expected at most 1048576"));
  EXPECT_GE(Stats().refused, 2);
}

TEST_F(RingsTest, SilentAndWrongConnectionsEnd) {
  const UniqueFd silent = Connect();
  EXPECT_EQ(ReadToEnd(silent), "");  // after handshake_timeout
  const auto answer = [&](const std::string& bytes) { return ReadToEnd(Connect(bytes)); };
  EXPECT_THAT(answer(FrameOf(ring::kPrepare, uint64_t{0})), HasSubstr("kind: got 2"));
  EXPECT_THAT(answer(FrameOf(ring::kOpen, uint64_t{0})), HasSubstr("open: got 8 bytes"));
  EXPECT_THAT(answer(FrameOf(ring::kOpen, ring::OpenBody{9, 8, 0})),
              HasSubstr("version: got 9, expected 1"));
  for (const uint32_t slots : {0u, 3u, 1024u}) {
    EXPECT_THAT(answer(FrameOf(ring::kOpen, ring::OpenBody{1, slots, 0})),
                HasSubstr(absl::StrCat("slots: got ", slots)));
  }
  EXPECT_EQ(answer(std::string(64, '\xff')), "");  // a frame of 4 GiB
  EXPECT_TRUE(Eventually([&] { return Stats().rings == 0; }));
  OpenPrepared();
  EXPECT_TRUE(ring_->Run(CallOf()).status.ok());
}

// The server would hold both ends of a connection that passes it its own.
TEST_F(RingsTest, DescriptorsThatNoFrameTakesAreClosed) {
  for (const size_t cut : {size_t{0}, sizeof(ring::Frame) + 10, size_t{3}}) {
    const UniqueFd fd = Connect(FrameOf(ring::kOpen, ring::OpenBody{1, 4, 4096}));
    ASSERT_TRUE(Eventually([&] { return Stats().rings == 1; }));
    std::string bytes = FrameOf(ring::kRelease, std::array<char, 64>{});
    bytes.resize(bytes.size() - cut);
    iovec part = {bytes.data(), bytes.size()};
    alignas(cmsghdr) char control[CMSG_SPACE(3 * sizeof(int))] = {};
    msghdr message = {.msg_iov = &part,
                      .msg_iovlen = 1,
                      .msg_control = control,
                      .msg_controllen = sizeof(control)};
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(3 * sizeof(int));
    const int own[3] = {fd.get(), fd.get(), fd.get()};
    std::memcpy(CMSG_DATA(header), own, sizeof(own));
    ASSERT_EQ(sendmsg(fd.get(), &message, MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
  }
  EXPECT_TRUE(Eventually([&] { return Stats().rings == 0; }));
}

TEST_F(RingsTest, ItSleepsWithoutTrafficAndWakes) {
  OpenPrepared();
  for (int i = 0; i < 3; ++i) {
    const int64_t before = Stats().sleeps;
    EXPECT_TRUE(ring_->Run(CallOf()).status.ok());
    EXPECT_TRUE(Eventually([&] { return Stats().sleeps > before; }));
  }
}

}  // namespace
}  // namespace awqd::services
