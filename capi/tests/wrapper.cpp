// SPDX-License-Identifier: MIT OR Apache-2.0
/* cpattn.hpp: handles are made, moved and destroyed once, errors are exceptions with status, name, message and rank. */
#include <cpattn.hpp>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <type_traits>

static_assert(sizeof(cpattn::Plan) == sizeof(cpattn_plan *), "a handle is a pointer");
static_assert(!std::is_copy_constructible<cpattn::Rank>::value, "a handle has one owner");
static_assert(std::is_same<decltype(cpattn::make<cpattn_scratch_create>(1u)), cpattn::Scratch>::value, "of its own type");

static void expect(bool holds, const char *what) {
  if (holds) return;
  std::fprintf(stderr, "not so: %s\n", what);
  std::exit(1);
}

template <class Call>
static cpattn::Error refused(const char *what, Call call) {
  try {
    call();
  } catch (const cpattn::Error &error) {
    return error;
  }
  std::fprintf(stderr, "not refused: %s\n", what);
  std::exit(1);
}

int main() {
  const std::array<int32_t, 3> documents{0, 3, 8};
  cpattn_problem problem = CPATTN_PROBLEM_INIT;
  problem.cu_seqlens_q = documents.data();
  problem.documents = 2;
  problem.heads = 2;
  problem.head_dim = 4;
  cpattn_options options = CPATTN_OPTIONS_INIT;
  options.world = 2;
  cpattn::Plan plan = cpattn::make<cpattn_plan_create>(&problem, &options);
  expect(cpattn::explain(plan.get()).find("2 documents") != std::string::npos, "explain has the plan's text");

  // The second document is a prefix of three tokens, which see each other, and two more.
  const std::array<cpattn_slice, 3> slices{{{0, 3, 0, 3, 0, INT64_MIN, 0}, {3, 6, 3, 6, 0, INT64_MIN, CPATTN_UNLIMITED}, {6, 8, 3, 8, 3, INT64_MIN, 0}}};
  problem.slices = slices.data();
  problem.slice_count = slices.size();
  cpattn::Error causal = refused("slices under a causal window", [&] { cpattn::make<cpattn_plan_create>(&problem, &options); });
  expect(std::string(causal.what()).find("slices[1]") != std::string::npos, causal.what());
  problem.window_right = CPATTN_UNLIMITED;
  plan = cpattn::make<cpattn_plan_create>(&problem, &options);
  cpattn::check(cpattn_plan_verify(plan.get()));
  cpattn::Schedule schedule = cpattn::make<cpattn_schedule_create>(plan.get(), 1u, CPATTN_BACKWARD);
  cpattn_schedule_info info = CPATTN_SCHEDULE_INFO_INIT;
  cpattn::check(cpattn_schedule_describe(schedule.get(), &info));
  expect(info.op_count > 0 && info.rank == 1 && info.direction == CPATTN_BACKWARD, "a schedule says whose it is");

  cpattn::Scratch scratch = cpattn::make<cpattn_scratch_create>(1u);

  problem.heads = 0;
  cpattn::Error none = refused("no heads", [&] { cpattn::make<cpattn_plan_create>(&problem, &options); });
  expect(none.status() == CPATTN_INVALID && none.peer() == -1, "status, and no rank");
  expect(std::string(none.what()).rfind("CPATTN_INVALID: ", 0) == 0, "the status's name comes first");
  expect(std::string(none.what()).find("heads") != std::string::npos, "the argument is named");
  expect(refused("no ranks", [] { cpattn::local_group(0, 1000); }).status() == CPATTN_INVALID, "no ranks");

  // A transport of a rank that is refused is destroyed, one of a rank that is made belongs to it.
  std::vector<cpattn::Transport> ends = cpattn::local_group(2, 60000);
  cpattn::Rank first = cpattn::make_rank(std::move(ends[0]));
  expect(first && !ends[0], "the rank took it over");
  cpattn_rank_options workers = CPATTN_RANK_OPTIONS_INIT;
  workers.workers = 1u << 20;
  cpattn::Error many = refused("workers", [&] { cpattn::make_rank(std::move(ends[1]), &workers); });
  expect(many.status() == CPATTN_INVALID, many.what());
  expect(!ends[1], "what was given is gone");

  // The other rank left, and this one names it.
  cpattn::Error alone = refused("a rank alone", [&] { cpattn::check(cpattn_rank_gather_trace(first.get())); });
  expect(alone.status() == CPATTN_PEER && alone.peer() == 1, alone.what());
  std::puts("ok");
}
