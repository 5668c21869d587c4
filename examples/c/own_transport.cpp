// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * A program's own transport, in C++17, as a framework would connect its communicator.
 *
 *   capi/build && c++ -std=c++17 examples/c/own_transport.cpp $(PKG_CONFIG_PATH=target/capi/lib/pkgconfig pkg-config --cflags --libs cpattn) \
 *     -Wl,-rpath,$PWD/target/capi/lib -lpthread -o target/own_transport && target/own_transport
 *
 * Four ranks (Ulysses 2 x ring 2) exchange messages through a board that four threads share; the result is compared with one
 * rank. Receivers copy directly from the senders' memory; a sender's exchange ends when all its messages were copied.
 */
#include <cpattn.hpp>

#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

// What all ranks share: posted sends by (from, to), and the numbers of an agreement.
class Board {
 public:
  explicit Board(uint32_t world) : world_(world), queues_(world * world), numbers_(world) {}

  // An all-gather as two barriers: all have written, all have read.
  bool agree(uint32_t rank, uint32_t first, uint32_t end, uint64_t number, uint64_t *all) {
    std::unique_lock<std::mutex> lock(mutex_);
    numbers_[rank] = number;
    if (!barrier(lock, end - first)) return false;
    for (uint32_t r = first; r < end; r++) all[r - first] = numbers_[r];
    return barrier(lock, end - first);
  }

  bool exchange(uint32_t rank, const cpattn_message *sends, size_t send_count, const cpattn_message *recvs, size_t recv_count) {
    size_t unfetched = send_count;
    std::unique_lock<std::mutex> lock(mutex_);
    for (size_t i = 0; i < send_count; i++) queue(rank, sends[i].peer).push_back({&sends[i], &unfetched});
    changed_.notify_all();
    bool ok = true;
    for (size_t i = 0; ok && i < recv_count; i++) {
      auto &from = queue(recvs[i].peer, rank);
      ok = wait(lock, [&] { return !from.empty(); }) && from.front().message->bytes == recvs[i].bytes;
      if (!ok) break;
      std::memcpy(recvs[i].data, from.front().message->data, recvs[i].bytes);
      --*from.front().unfetched;
      from.pop_front();
      changed_.notify_all();
    }
    ok = ok && wait(lock, [&] { return unfetched == 0; });
    if (!ok) {
      // No other rank may fetch from this rank's memory once it has left.
      failed_ = true;
      for (uint32_t peer = 0; peer < world_; peer++) queue(rank, peer).clear();
      changed_.notify_all();
    }
    return ok;
  }

  bool failed() const { return failed_; }

  void abort() {
    std::lock_guard<std::mutex> lock(mutex_);
    failed_ = true;
    changed_.notify_all();
  }

 private:
  struct Posted {
    const cpattn_message *message;
    size_t *unfetched;
  };

  std::deque<Posted> &queue(size_t from, size_t to) { return queues_[from * world_ + to]; }

  template <class Ready>
  bool wait(std::unique_lock<std::mutex> &lock, Ready ready) {
    bool in_time = changed_.wait_for(lock, std::chrono::seconds(30), [&] { return failed_ || ready(); });
    if (!in_time) failed_ = true;
    return in_time && !failed_;
  }

  bool barrier(std::unique_lock<std::mutex> &lock, uint32_t members) {
    uint64_t round = round_;
    if (++arrived_ == members) {
      arrived_ = 0;
      round_++;
      changed_.notify_all();
    }
    return wait(lock, [&] { return round_ != round; });
  }

  uint32_t world_;
  std::vector<std::deque<Posted>> queues_;
  std::vector<uint64_t> numbers_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> failed_{false};
  uint32_t arrived_ = 0;
  uint64_t round_ = 0;
};

struct Member {
  Board *board;
  uint32_t rank;
};

static cpattn::Transport transport_of(Member &member, uint32_t world) {
  cpattn_transport_table table = CPATTN_TRANSPORT_TABLE_INIT;
  table.context = &member;
  table.rank = member.rank;
  table.world = world;
  table.agree = [](void *c, uint32_t first, uint32_t end, uint64_t number, uint64_t *all, int64_t *) -> int32_t {
    auto *m = static_cast<Member *>(c);
    return m->board->agree(m->rank, first, end, number, all) ? 0 : 1;
  };
  table.exchange = [](void *c, const char *, uint32_t, const cpattn_message *sends, size_t send_count, const cpattn_message *recvs,
                      size_t recv_count, void * /* no stream: ranks of the CPU */, int64_t *) -> int32_t {
    auto *m = static_cast<Member *>(c);
    return m->board->exchange(m->rank, sends, send_count, recvs, recv_count) ? 0 : 1;
  };
  table.poll = [](void *c, int64_t *) -> int32_t { return static_cast<Member *>(c)->board->failed() ? 1 : 0; };
  table.abort = [](void *c) { static_cast<Member *>(c)->board->abort(); };
  return cpattn::make<cpattn_transport_create>(&table);
}

// A compact tensor that knows its shape; the description points into itself, so it stays where it is.
struct Tensor {
  std::vector<float> data;
  std::array<int64_t, 3> shape;
  cpattn_tensor view{};

  Tensor(int64_t a, int64_t b, int64_t c) : data(static_cast<size_t>(a * b * c), NAN), shape{a, b, c} { describe(3); }
  Tensor(int64_t a, int64_t b) : data(static_cast<size_t>(a * b), NAN), shape{a, b, 1} { describe(2); }
  Tensor(const Tensor &) = delete;
  Tensor &operator=(const Tensor &) = delete;

 private:
  void describe(int32_t ndim) {
    view.data = data.data();
    view.device = {CPATTN_DEVICE_CPU, 0};
    view.ndim = ndim;
    view.dtype = {2, 32, 1};
    view.shape = shape.data();
  }
};

constexpr int64_t kTokens = 300, kHeads = 6, kKvHeads = 2, kDim = 16;

struct Whole {
  Tensor q{kTokens, kHeads, kDim}, k{kTokens, kKvHeads, kDim}, v{kTokens, kKvHeads, kDim}, d_o{kTokens, kHeads, kDim};
  Tensor o{kTokens, kHeads, kDim}, dq{kTokens, kHeads, kDim}, dk{kTokens, kKvHeads, kDim}, dv{kTokens, kKvHeads, kDim};
};

static void run(cpattn_plan *plan, uint32_t r, cpattn::Transport transport, Whole &w) {
  cpattn::Rank rank = cpattn::make_rank(std::move(transport));
  cpattn_share share = CPATTN_SHARE_INIT;
  cpattn::check(cpattn_plan_share(plan, r, &share));
  auto nq = static_cast<int64_t>(share.q_tokens), nk = static_cast<int64_t>(share.k_tokens);
  Tensor q(nq, kHeads, kDim), k(nk, kKvHeads, kDim), v(nk, kKvHeads, kDim), d_o(nq, kHeads, kDim), o(nq, kHeads, kDim);
  Tensor dq(nq, kHeads, kDim), dk(nk, kKvHeads, kDim), dv(nk, kKvHeads, kDim), lse(kHeads, nq);
  cpattn::check(cpattn_plan_shard(plan, CPATTN_Q, r, &w.q.view, &q.view));
  cpattn::check(cpattn_plan_shard(plan, CPATTN_K, r, &w.k.view, &k.view));
  cpattn::check(cpattn_plan_shard(plan, CPATTN_K, r, &w.v.view, &v.view));
  cpattn::check(cpattn_plan_shard(plan, CPATTN_Q, r, &w.d_o.view, &d_o.view));

  cpattn_forward_args f = CPATTN_FORWARD_ARGS_INIT;
  f.q = &q.view, f.k = &k.view, f.v = &v.view, f.o = &o.view, f.lse = &lse.view;
  cpattn::check(cpattn_forward(rank.get(), plan, &f));
  cpattn_backward_args b = CPATTN_BACKWARD_ARGS_INIT;
  b.q = &q.view, b.k = &k.view, b.v = &v.view, b.o = &o.view, b.lse = &lse.view, b.d_o = &d_o.view;
  b.dq = &dq.view, b.dk = &dk.view, b.dv = &dv.view;
  cpattn::check(cpattn_backward(rank.get(), plan, &b));

  cpattn::check(cpattn_plan_unshard(plan, CPATTN_Q, r, &o.view, &w.o.view));
  cpattn::check(cpattn_plan_unshard(plan, CPATTN_Q, r, &dq.view, &w.dq.view));
  cpattn::check(cpattn_plan_unshard(plan, CPATTN_K, r, &dk.view, &w.dk.view));
  cpattn::check(cpattn_plan_unshard(plan, CPATTN_K, r, &dv.view, &w.dv.view));
}

static cpattn::Plan plan_for(uint32_t ulysses, uint32_t ring) {
  static const std::array<int32_t, 4> documents{0, 70, 71, kTokens};
  cpattn_problem p = CPATTN_PROBLEM_INIT;
  p.cu_seqlens_q = documents.data();
  p.documents = documents.size() - 1;
  p.heads = kHeads;
  p.kv_heads = kKvHeads;
  p.head_dim = kDim;
  p.window_left = 99;
  cpattn_options o = CPATTN_OPTIONS_INIT;
  o.world = ulysses * ring;
  o.ulysses = ulysses;
  o.ring = ring;
  return cpattn::make<cpattn_plan_create>(&p, &o);
}

static double difference(const char *name, const Tensor &a, const Tensor &b) {
  double error = 0, size = 0;
  for (size_t i = 0; i < a.data.size(); i++) {
    error += std::pow(double(a.data[i]) - double(b.data[i]), 2);
    size += std::pow(double(b.data[i]), 2);
  }
  double relative = std::sqrt(error / size);
  std::printf("%-2s four ranks against one: %.1e\n", name, relative);
  return relative;
}

int main() try {
  auto one = std::make_unique<Whole>(), four = std::make_unique<Whole>();
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (auto member : {&Whole::q, &Whole::k, &Whole::v, &Whole::d_o}) {
    for (auto &x : ((*one).*member).data) x = normal(random);
    ((*four).*member).data = ((*one).*member).data;
    ((*four).*member).view.data = ((*four).*member).data.data();
  }

  cpattn::Plan single = plan_for(1, 1);
  run(single.get(), 0, std::move(cpattn::local_group(1, 1000)[0]), *one);

  constexpr uint32_t world = 4;
  cpattn::Plan plan = plan_for(2, 2);
  Board board(world);
  std::array<Member, world> members{};
  std::vector<std::thread> threads;
  std::atomic<int> failures{0};
  for (uint32_t r = 0; r < world; r++) {
    members[r] = {&board, r};
    threads.emplace_back([&, r] {
      try {
        run(plan.get(), r, transport_of(members[r], world), *four);
      } catch (const std::exception &e) {
        std::fprintf(stderr, "rank %u: %s\n", r, e.what());
        failures++;
        board.abort();
      }
    });
  }
  for (auto &t : threads) t.join();
  if (failures) return 1;

  bool ok = difference("o", four->o, one->o) < 1e-6;
  ok &= difference("dq", four->dq, one->dq) < 1e-6;
  ok &= difference("dk", four->dk, one->dk) < 1e-6;
  ok &= difference("dv", four->dv, one->dv) < 1e-6;
  std::puts(ok ? "ok" : "FAILED");
  return ok ? 0 : 1;
} catch (const std::exception &e) {
  std::fprintf(stderr, "%s\n", e.what());
  return 1;
}
