// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * cpattn.h for C++17: handles that destroy themselves, statuses as exceptions. Nothing else: structs, functions and their manual are
 * those of cpattn.h, and a handle from here goes wherever one from there does. There is no state and no library besides libcpattn.
 *
 *   cpattn::Plan plan = cpattn::make<cpattn_plan_create>(&problem, &options);
 *   std::vector<cpattn::Transport> ends = cpattn::local_group(4, 60000);
 *   cpattn::Rank rank = cpattn::make_rank(std::move(ends[0]));
 *   cpattn::check(cpattn_forward(rank.get(), plan.get(), &args));
 */
#ifndef CPATTN_HPP
#define CPATTN_HPP

#include <cpattn.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace cpattn {

/* A call that failed: what() begins with the status's name; the message is the library's. */
class Error : public std::runtime_error {
 public:
  explicit Error(int32_t status)
      : std::runtime_error(std::string(cpattn_status_name(status)) + ": " + cpattn_last_error()),
        status_(status),
        peer_(cpattn_last_error_peer()) {}

  int32_t status() const noexcept { return status_; }
  /* The rank that the error names, as cpattn_last_error_peer, or -1. */
  int64_t peer() const noexcept { return peer_; }

 private:
  int32_t status_;
  int64_t peer_;
};

/* Throws unless the status is CPATTN_OK. Call it with the call itself: the message is that of this thread's last failure. */
inline void check(int32_t status) {
  if (status != CPATTN_OK) throw Error(status);
}

namespace detail {
template <auto Destroy>
struct Destroyer {
  template <class T>
  void operator()(T *handle) const noexcept {
    Destroy(handle);
  }
};

/* The type of the handle that a function writes through its last argument. */
template <class Function>
struct Made;
template <class... Arguments>
struct Made<int32_t (*)(Arguments...)> {
  template <class First, class... Rest>
  struct Last : Last<Rest...> {};
  template <class Only>
  struct Last<Only **> {
    using type = Only;
  };
  using type = typename Last<Arguments...>::type;
};

template <class T>
struct Owner;
}  // namespace detail

using Plan = std::unique_ptr<cpattn_plan, detail::Destroyer<cpattn_plan_destroy>>;
using Transport = std::unique_ptr<cpattn_transport, detail::Destroyer<cpattn_transport_destroy>>;
using Rank = std::unique_ptr<cpattn_rank, detail::Destroyer<cpattn_rank_destroy>>;
using Scratch = std::unique_ptr<cpattn_scratch, detail::Destroyer<cpattn_scratch_destroy>>;
using Schedule = std::unique_ptr<cpattn_schedule, detail::Destroyer<cpattn_schedule_destroy>>;

namespace detail {
template <>
struct Owner<cpattn_plan> {
  using type = Plan;
};
template <>
struct Owner<cpattn_transport> {
  using type = Transport;
};
template <>
struct Owner<cpattn_rank> {
  using type = Rank;
};
template <>
struct Owner<cpattn_scratch> {
  using type = Scratch;
};
template <>
struct Owner<cpattn_schedule> {
  using type = Schedule;
};
}  // namespace detail

/* The handle that a function of the header makes: its arguments are the function's without the last one. Ranks are made by
 * make_rank, which takes a transport over. */
template <auto Create, class... Arguments>
auto make(Arguments... arguments) {
  using T = typename detail::Made<decltype(Create)>::type;
  T *handle = nullptr;
  check(Create(arguments..., &handle));
  return typename detail::Owner<T>::type(handle);
}

/* A rank owns its transport; after a failure the transport is destroyed. */
inline Rank make_rank(Transport transport, const cpattn_rank_options *options = nullptr) {
  cpattn_rank *rank = nullptr;
  check(cpattn_rank_create(transport.get(), options, &rank));
  transport.release();
  return Rank(rank);
}

inline std::vector<Transport> local_group(uint32_t world, uint64_t deadline_ms) {
  std::vector<cpattn_transport *> handles(world);
  std::vector<Transport> owned(world);
  check(cpattn_local_group(world, deadline_ms, handles.data()));
  for (std::size_t rank = 0; rank < owned.size(); rank++) owned[rank].reset(handles[rank]);
  return owned;
}

/* The text that cpattn_plan_explain writes. */
inline std::string explain(const cpattn_plan *plan) {
  std::size_t needed = 0;
  check(cpattn_plan_explain(plan, nullptr, 0, &needed));
  std::string text(needed, '\0');
  check(cpattn_plan_explain(plan, text.data(), needed, &needed));
  text.resize(needed - 1);
  return text;
}

}  // namespace cpattn

#endif /* CPATTN_HPP */
