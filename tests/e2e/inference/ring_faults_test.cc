// Rings under load, beside clients that are killed, lie, scribble over their memory, fill their
// ring, and register and leave; and a server that is stopped and started. Every answer of the
// others is right and comes, they are not held up, and memory is what it was.
//
// AWQD_TEST_RING_SECONDS says how long; by default ten minutes with AWQD_TEST_LONG, else 16 s. With
// AWQD_TEST_DEVICE=cuda:N the server runs on that GPU, and callers and faulty clients share memory of
// it, by handles and by descriptors.
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <random>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "awqd/ring/layout.h"
#include "client/device_memory.h"
#include "client/ring.h"
#include "gtest/gtest.h"
#include "kernels/base/mutex.h"
#include "kernels/base/unique_fd.h"
#include "tests/e2e/server_test.h"

namespace awqd {
namespace {

using client::DeviceMemory, client::RingAnswer, client::RingCall, client::RingPrepared;

constexpr int64_t kK = 256, kN = 512;
constexpr int64_t kPart = 1 << 17;  // bytes of the payload for one caller
constexpr int kCallers = 3;

absl::Duration Length() {
  const char* text = std::getenv("AWQD_TEST_RING_SECONDS");
  int seconds = 0;
  if (text != nullptr && absl::SimpleAtoi(text, &seconds)) return absl::Seconds(seconds);
  return std::getenv("AWQD_TEST_LONG") != nullptr ? absl::Minutes(10) : absl::Seconds(16);
}

// The device of the server, and the GPU's number.
std::string DeviceSpec() {
  const char* const spec = std::getenv("AWQD_TEST_DEVICE");
  return spec == nullptr ? "cpu" : spec;
}
bool OnGpu() { return absl::StartsWith(DeviceSpec(), "cuda:"); }
int Gpu() {
  int index = 0;
  return absl::SimpleAtoi(absl::StripPrefix(DeviceSpec(), "cuda:"), &index) ? index : 0;
}

// A number that is small, at an edge, or anything.
int64_t OddNumber(std::mt19937_64& random) {
  const auto any = static_cast<int64_t>(random());
  switch (random() % 5) {
    case 0:
      return any % 64;
    case 1:
      return kPart - any % 4096;
    case 2:
      return INT64_MAX - any % 2;
    case 3:
      return INT64_MIN;
    default:
      return any;
  }
}

// The counts of callers that follow the rules.
struct Tally {
  int64_t answers = 0, wrong = 0, lost = 0;
  std::vector<float> us;

  void Add(const Tally& other) {
    answers += other.answers, wrong += other.wrong, lost += other.lost;
    us.insert(us.end(), other.us.begin(), other.us.end());
  }
  float Quantile(double share) {
    const auto at = us.begin() + static_cast<int64_t>(share * static_cast<double>(us.size() - 1));
    std::nth_element(us.begin(), at, us.end());
    return *at;
  }
};

class RingFaultsTest : public ServerTest {
 protected:
  void SetUp() override {
    SyntheticAwq::Random(kK, kN, 64, 1).Write(repository_ / "m");
    Start(kFlags);
    for (const int64_t tokens : {1, 5, 33}) {
      const client::MatmulCall call = LayerCall(tokens, kK, v1::FP16);
      const auto y = client_->QuantizedMatmul(call);
      ASSERT_TRUE(y.ok()) << y.status();
      cases_.push_back({tokens, call.activations.bytes, y->output.bytes});
    }
  }

  static client::MatmulCall Form() {
    client::MatmulCall form = LayerCall(1, kK, v1::FP16);
    form.activations.bytes.clear();
    return form;
  }
  std::unique_ptr<client::Ring> Open(uint32_t slots, absl::Duration timeout) const {
    auto ring = client::Ring::Open(
        {.path = path_, .slots = slots, .payload_bytes = kCallers * kPart, .timeout = timeout});
    return ring.ok() ? *std::move(ring) : nullptr;
  }

  // Calls until `stop`, or until an error. `part`: the caller's part of the payload, or of `memory`,
  // where the ring's region `region` is.
  absl::Status CallUntil(const std::atomic<bool>& stop, client::Ring& ring, int part, Tally* tally,
                         const DeviceMemory* memory = nullptr,
                         const std::string& region = "") const {
    client::MatmulCall form = Form();
    if (memory != nullptr) {
      form.shared_activations = form.shared_output = DeviceMemory::Range(region, 0, 0);
    }
    auto prepared = ring.Prepare(form);
    if (!prepared.ok()) return prepared.status();
    const RingPrepared product = *prepared;
    prepared = ring.PrepareChain({{product}, {product}});
    if (!prepared.ok()) return prepared.status();
    const int64_t x_offset = part * kPart, y_offset = x_offset + (1 << 15);
    for (size_t i = 0; !stop; ++i) {
      const Case& one = cases_[i % cases_.size()];
      const int results = i % 8 == 0 ? 2 : 1;  // a chain of two
      const std::string nothing(results * one.y.size(), '\xee');
      if (memory != nullptr) {
        absl::Status written = memory->Write(x_offset, one.x);
        written.Update(memory->Write(y_offset, nothing));
        if (!written.ok()) return written;
      } else {
        one.x.copy(ring.payload() + x_offset, one.x.size());
        nothing.copy(ring.payload() + y_offset, nothing.size());
      }
      const absl::Time start = absl::Now();
      const RingAnswer answer = ring.Run({.call = results == 2 ? prepared->number : product.number,
                                          .tokens = one.tokens,
                                          .x_offset = x_offset,
                                          .y_offset = y_offset});
      if (!answer.status.ok()) return answer.status;
      if (i % 8 == 1) tally->us.push_back(absl::ToDoubleMicroseconds(absl::Now() - start));
      ++tally->answers;
      absl::StatusOr<std::string> all(
          std::string(ring.payload() + (memory == nullptr ? y_offset : 0),
                      memory == nullptr ? nothing.size() : 0));
      if (memory != nullptr) all = memory->Read(y_offset, static_cast<int64_t>(nothing.size()));
      if (!all.ok()) return all.status();
      tally->wrong += *all != (results == 2 ? one.y + one.y : one.y);
    }
    return absl::OkStatus();
  }

  // Callers that follow the rules, in one ring, for so long.
  Tally CallFor(absl::Duration time) const {
    const auto ring = Open(8, absl::Seconds(20));
    if (ring == nullptr) return {.lost = 1};
    std::atomic<bool> stop{false};
    std::vector<Tally> tallies(kCallers);
    std::vector<std::thread> callers;
    for (int i = 0; i < kCallers; ++i) {
      callers.emplace_back([&, i] {
        std::unique_ptr<DeviceMemory> memory;
        const std::string region = absl::StrCat("caller", i);
        absl::Status status;
        if (OnGpu() && i > 0) {
          const auto kind = i == 1 ? DeviceMemory::Kind::kIpc : DeviceMemory::Kind::kDescriptor;
          auto made = DeviceMemory::Allocate(Gpu(), kCallers * kPart, kind);
          status = made.status();
          if (made.ok()) {
            memory = *std::move(made);
            status = ring->ShareMemory(memory->Request(region), memory->descriptor());
          }
        }
        if (status.ok()) status = CallUntil(stop, *ring, i, &tallies[i], memory.get(), region);
        EXPECT_TRUE(status.ok()) << status;
        tallies[i].lost += !status.ok();
      });
    }
    absl::SleepFor(time);
    stop = true;
    Tally all;
    for (int i = 0; i < kCallers; ++i) {
      callers[i].join();
      all.Add(tallies[i]);
    }
    return all;
  }

  // --- Clients that break rules; each returns after one go ---

  // Killed at any step: while it starts, connects, prepares, or with calls in flight.
  void BeKilled(std::mt19937_64& random) const {
    std::vector<std::string> args = {"bench",           "--weight=m/layer", "--tokens=1,300",
                                     "--ring=" + path_, "--warmup=0",       "--duration=60",
                                     "--concurrency=2"};
    if (OnGpu()) args.push_back(absl::StrCat("--device_tensors=", Gpu()));
    // Making a context of a GPU takes a client longer.
    server_->Awqctl(args, absl::Milliseconds(random() % (OnGpu() ? 900 : 120)));
  }

  // Offsets, counts and numbers that lie. The bytes that no call may write stay.
  void Lie(std::mt19937_64& random) const {
    const auto ring = Open(4, absl::Seconds(20));
    if (ring == nullptr) return;
    const auto product = ring->Prepare(Form());
    if (!product.ok()) return;
    for (int i = 0; i < 50; ++i) {
      const RingCall call = {.call = random() % 4 == 0 ? static_cast<uint32_t>(random()) : 1,
                             .tokens = OddNumber(random),
                             .x_offset = OddNumber(random),
                             .y_offset = OddNumber(random),
                             .ids_offset = OddNumber(random),
                             .router_offset = OddNumber(random),
                             .scales_offset = OddNumber(random)};
      const auto within = [&](int64_t offset, int64_t bytes) {
        int64_t all = 0, end = 0;
        return call.tokens >= 0 && offset >= 0 &&
               !__builtin_mul_overflow(call.tokens, bytes, &all) &&
               !__builtin_add_overflow(offset, all, &end) && end <= ring->payload_bytes();
      };
      const bool right = call.call == 1 && within(call.x_offset, product->x_bytes) &&
                         within(call.y_offset, product->y_bytes);
      const RingAnswer answer = ring->Run(call);
      EXPECT_EQ(answer.status.ok(), right) << answer.status << " tokens " << call.tokens << " x "
                                           << call.x_offset << " y " << call.y_offset;
    }
  }

  // Writes anything anywhere in all of its memory, by a mapping of its own, while calls run.
  void Scribble(std::mt19937_64& random) const {
    const auto ring = Open(8, absl::Milliseconds(20));
    if (ring == nullptr || !ring->Prepare(Form()).ok()) return;
    const size_t words =
        (ring::kHeaderBytes + 8 * sizeof(ring::Slot) + static_cast<size_t>(kPart)) / 8;
    void* const alias = mremap(ring->header(), 0, words * 8, MREMAP_MAYMOVE);
    if (alias == MAP_FAILED) return;
    std::atomic<bool> stop{false};
    std::thread scribbler([&, seed = random()] {
      std::mt19937_64 own(seed);
      auto* const memory = static_cast<uint64_t*>(alias);
      while (!stop) {
        for (int i = 0; i < 200; ++i) {
          // Mostly requests and answers; the header rarely, because that ends the ring.
          const uint64_t place =
              own() % 4000 == 0 ? own() % words : 512 + own() % (8 * sizeof(ring::Slot) / 8);
          __atomic_store_n(memory + place, own() >> (own() & 63), __ATOMIC_RELAXED);
        }
        absl::SleepFor(absl::Microseconds(200));
      }
    });
    for (int i = 0; i < 10; ++i) {
      // Apart, because some may still run when they are given up.
      const int64_t at = i * 32768;
      const RingCall call = {.call = 1, .tokens = 1 + i, .x_offset = at, .y_offset = at + 16384};
      if (absl::IsUnavailable(ring->Run(call).status)) break;
    }
    stop = true;
    scribbler.join();
    munmap(alias, words * 8);
  }

  // More callers than slots, and a tail that is ahead of them.
  void Fill(std::mt19937_64& random) const {
    const auto ring = Open(2, absl::Seconds(20));
    if (ring == nullptr || !ring->Prepare(Form()).ok()) return;
    std::vector<std::thread> callers;
    for (int i = 0; i < 4; ++i) {
      callers.emplace_back([&, at = i * 4096] {
        for (int k = 0; k < 50; ++k) {
          const RingCall call = {.call = 1, .tokens = 1, .x_offset = at, .y_offset = at + 2048};
          const absl::Status status = ring->Run(call).status;
          EXPECT_TRUE(status.ok() || absl::IsResourceExhausted(status)) << status;
        }
      });
    }
    for (std::thread& caller : callers) caller.join();
    ring->header()->tail += 3 + random() % 1000;
    const absl::Time start = absl::Now();
    (void)ring->Run({.call = 1, .tokens = 1});  // which sets the tail right, in time or too late
    EXPECT_LT(absl::Now() - start, absl::Seconds(10)) << "nobody told it that its ring has ended";
  }

  // Frames that are none, are too long, or end in the middle.
  void Babble(std::mt19937_64& random) const {
    const UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un address = {.sun_family = AF_UNIX};
    std::strncpy(address.sun_path, path_.c_str(), sizeof(address.sun_path) - 1);
    if (connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) return;
    std::string bytes;
    const auto add = [&](const auto& value) {
      bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
    };
    add(ring::Frame{ring::kOpen, sizeof(ring::OpenBody), 0});
    add(ring::OpenBody{ring::kVersion, 4, 4096});
    for (int i = 0; i < 20; ++i) {
      const auto size = static_cast<uint32_t>(random() % 200);
      add(ring::Frame{static_cast<uint32_t>(random() % 8), size, random() % 6});
      for (uint32_t k = 0; k < size; ++k) bytes.push_back(static_cast<char>(random()));
    }
    bytes.resize(bytes.size() - random() % 40);
    if (random() % 2 == 0) add(ring::Frame{2, UINT32_MAX, 4});
    // With descriptors that nobody asked for, up to more than the server takes.
    iovec part = {bytes.data(), bytes.size()};
    alignas(cmsghdr) char control[CMSG_SPACE(4 * sizeof(int))] = {};
    msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (const size_t count = random() % 5; count > 0) {
      message.msg_control = control;
      message.msg_controllen = CMSG_SPACE(count * sizeof(int));
      cmsghdr* const header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(count * sizeof(int));
      for (size_t i = 0; i < count; ++i) {
        const int own = fd.get();
        std::memcpy(CMSG_DATA(header) + i * sizeof(own), &own, sizeof(own));
      }
    }
    for (int i = 0; i < 2; ++i) sendmsg(fd.get(), &message, MSG_NOSIGNAL);
    char answer[256];
    for (int i = 0; i < 5; ++i) (void)recv(fd.get(), answer, sizeof(answer), MSG_DONTWAIT);
  }

  // Shares memory of the GPU: with lies about it, ranges that lie, and memory that is freed, or taken
  // back, under the calls that use it.
  void Share(std::mt19937_64& random) {
    const auto ring = Open(4, absl::Seconds(20));
    const auto kind =
        random() % 2 == 0 ? DeviceMemory::Kind::kIpc : DeviceMemory::Kind::kDescriptor;
    auto memory = DeviceMemory::Allocate(Gpu(), kPart, kind);
    if (ring == nullptr || !memory.ok()) return;
    const std::string region = absl::StrCat("r", random());
    v1::ShareMemoryRequest request = (*memory)->Request(region);
    const uint64_t lie = random() % 8;
    if (lie == 0) request.set_device("cuda:63");
    if (lie == 1) request.set_size(static_cast<int64_t>(random()));
    if (lie == 2) request.set_offset(OddNumber(random));
    if (lie == 3 && kind == DeviceMemory::Kind::kIpc) {
      for (char& byte : *request.mutable_cuda_ipc_memory()) byte = static_cast<char>(random());
    }
    ++registrations_;
    const absl::Status shared = ring->ShareMemory(request, (*memory)->descriptor());
    if (lie > 3) {
      EXPECT_TRUE(shared.ok()) << shared;
    }
    if (!shared.ok()) return;
    client::MatmulCall form = Form();
    form.shared_activations = form.shared_output = DeviceMemory::Range(region, 0, 0);
    const auto product = ring->Prepare(form);
    EXPECT_TRUE(product.ok()) << product.status();
    if (!product.ok()) return;
    std::vector<uint32_t> slots;
    for (int i = 0; i < 4; ++i) {
      RingCall call = {.call = product->number,
                       .tokens = 5,
                       .x_offset = i * 16384,
                       .y_offset = i * 16384 + 8192};
      if (i == 3) call.y_offset = OddNumber(random);
      const auto slot = ring->Submit(call);
      if (slot.ok()) slots.push_back(*slot);
    }
    if (lie % 2 == 0) memory->reset();
    if (lie == 5) (void)ring->UnshareMemory(region);
    if (lie == 6) return;  // the ring ends under them
    for (const uint32_t slot : slots) (void)ring->Wait(slot);
  }
  int64_t DeviceBytes() const {
    const auto info = client_->GetServerInfo();
    EXPECT_TRUE(info.ok()) << info.status();
    return info.ok() && OnGpu() ? info->devices(0).memory_free_bytes() : 0;
  }

  // Opens a ring and prepares calls and chains; half of them are released, the ring ends the rest.
  void Register(std::mt19937_64& random) {
    const auto ring = Open(8, absl::Seconds(20));
    if (ring == nullptr) return;
    ++registrations_;
    for (int i = 0; i < 20; ++i) {
      const auto made = i % 5 == 4 ? ring->PrepareChain({{{.number = 1}}, {{.number = 1}}})
                                   : ring->Prepare(Form());
      EXPECT_TRUE(made.ok()) << made.status();
      ++registrations_;
      if (!made.ok() || i == 0 || random() % 2 == 0) continue;
      EXPECT_TRUE(ring->Release(made->number).ok());
    }
  }

  // Repeats `go` with a pause, so that what is measured is more than who gets the cores.
  void Repeat(const std::string& name, int pause_ms, std::function<void(std::mt19937_64&)> go) {
    const size_t index = goes_.size();
    goes_.push_back({name, 0});
    goes_threads_.emplace_back([this, index, pause_ms, go = std::move(go)] {
      std::mt19937_64 random(index + 1);
      for (int64_t done = 0; !stop_;) {
        go(random);
        ++done;
        {
          MutexLock lock(&mu_);
          goes_[index].second = done;
        }
        absl::SleepFor(absl::Milliseconds(pause_ms));
      }
    });
  }

  struct Case {
    int64_t tokens;
    std::string x, y;
  };

  TempFolder folder_;
  const std::string path_ = folder_ / "ring.sock";
  const std::vector<std::string> kFlags = [this] {
    std::vector<std::string> out = {"--ring_path=" + path_, "--ring_spin_us=20",
                                    "--max_rings_per_client=64", "--device=" + DeviceSpec()};
    // A result is compared with that of another batch.
    if (OnGpu()) out.insert(out.end(), {"--cuda_shared_memory", "--batch_invariant"});
    return out;
  }();
  std::vector<Case> cases_;
  std::atomic<bool> stop_{false};
  std::atomic<int64_t> registrations_{0};
  Mutex mu_;
  std::vector<std::pair<std::string, int64_t>> goes_;
  std::vector<std::thread> goes_threads_;
};

TEST_F(RingFaultsTest, OthersGoOn) {
  const int files = server_->open_files();
  std::mt19937_64 random(7);
  const auto all = [&] {
    Lie(random), Scribble(random), Fill(random), Babble(random), Register(random);
    if (OnGpu()) Share(random);
  };
  for (int i = 0; i < 8; ++i) all();  // what is made once is there before memory is measured
  CallFor(absl::Milliseconds(500));
  const int64_t memory = server_->anonymous_bytes(), device_memory = DeviceBytes();
  Tally before = CallFor(Length() / 8);

  goes_.reserve(16);
  Repeat("killed", 5, [&](auto& own) { BeKilled(own); });
  Repeat("liars", 20, [&](auto& own) { Lie(own); });
  Repeat("scribblers", 20, [&](auto& own) { Scribble(own); });
  Repeat("fillers", 20, [&](auto& own) { Fill(own); });
  Repeat("babblers", 20, [&](auto& own) { Babble(own); });
  Repeat("registrars", 1, [&](auto& own) { Register(own); });
  if (OnGpu()) Repeat("sharers", 5, [&](auto& own) { Share(own); });
  Tally beside = CallFor(Length());
  while (registrations_ < 10'000) absl::SleepFor(absl::Milliseconds(20));
  stop_ = true;
  for (std::thread& thread : goes_threads_) thread.join();
  Tally after = CallFor(Length() / 8);

  EXPECT_EQ(before.wrong + beside.wrong + after.wrong, 0);
  EXPECT_EQ(before.lost + beside.lost + after.lost, 0);
  EXPECT_LE(server_->OpenFilesAgain(files), files);
  std::cout << "answers " << before.answers << " alone, " << beside.answers << " beside";
  for (const auto& [name, count] : goes_) std::cout << ", " << count << " " << name;
  const int64_t now = server_->anonymous_bytes();
  std::cout << ", " << registrations_ << " registrations; p50 " << before.Quantile(0.5) << " us, "
            << beside.Quantile(0.5) << " beside, " << after.Quantile(0.5) << " after; p99 "
            << before.Quantile(0.99) << ", " << beside.Quantile(0.99) << ", "
            << after.Quantile(0.99) << "; memory " << memory << ", then " << now << " bytes\n";
  // Sanitizers take time of their own, and keep what is freed.
#if !defined(AWQD_ADDRESS_SANITIZER) && !defined(AWQD_THREAD_SANITIZER)
  // Two seconds alone are too few to compare with on a machine that has other work.
  if (Length() >= absl::Minutes(1)) {
    EXPECT_LT(beside.Quantile(0.5), 2 * std::max(before.Quantile(0.5), after.Quantile(0.5)));
    // Where all have cores of their own.
    if (std::thread::hardware_concurrency() >= 16) {
      EXPECT_LT(beside.Quantile(0.99), 2 * std::max(before.Quantile(0.99), after.Quantile(0.99)));
    }
  }
  EXPECT_LT(now, memory + ((OnGpu() ? 32 : 8) << 20));
#endif
  EXPECT_TRUE(Eventually([&] { return DeviceBytes() + (64 << 20) >= device_memory; }))
      << device_memory << " bytes of the GPU were free, now " << DeviceBytes();
  Stop();
}

// Callers that open rings again, while the server stops, is killed, and starts.
TEST_F(RingFaultsTest, AServerThatStopsAndStarts) {
  std::vector<Tally> tallies(kCallers);
  std::vector<int64_t> opened(kCallers);
  std::vector<std::thread> callers;
  for (int i = 0; i < kCallers; ++i) {
    callers.emplace_back([&, i] {
      while (!stop_) {
        const auto ring = Open(4, absl::Seconds(20));
        if (ring == nullptr) {
          absl::SleepFor(absl::Milliseconds(5));
          continue;
        }
        ++opened[i];
        const absl::Status status = CallUntil(stop_, *ring, i, &tallies[i]);
        // No call is without an answer: it is the result, or that the server has gone.
        EXPECT_TRUE(status.ok() || absl::IsUnavailable(status) || absl::IsCancelled(status))
            << status;
      }
    });
  }
  const absl::Time end = absl::Now() + Length() / 4;
  int starts = 0;
  while (absl::Now() < end || starts < 4) {
    absl::SleepFor(absl::Milliseconds(100 + 37 * (starts % 5)));
    if (starts % 2 == 0) {
      Stop();
    } else {
      server_->Signal(SIGKILL);
      server_->Wait();
    }
    Start(kFlags);
    ++starts;
  }
  stop_ = true;
  Tally all;
  int64_t rings = 0;
  for (int i = 0; i < kCallers; ++i) {
    callers[i].join();
    all.Add(tallies[i]);
    rings += opened[i];
  }
  std::cout << starts << " starts, " << rings << " rings, " << all.answers << " answers\n";
  EXPECT_EQ(all.wrong, 0);
  EXPECT_GT(all.answers, 0);
  EXPECT_GT(rings, starts);
}

}  // namespace
}  // namespace awqd
