#include "cpattn.h"
struct cpattn_plan { char opaque; };
struct cpattn_transport { char opaque; };
struct cpattn_rank { char opaque; };
struct cpattn_scratch { char opaque; };
struct cpattn_schedule { char opaque; };
uint32_t cpattn_version(void) { return 0; }
const char *cpattn_last_error(void) { return 0; }
int64_t cpattn_last_error_peer(void) { return 0; }
const char *cpattn_status_name(int32_t status) { return 0; }
int32_t cpattn_ranks_per_node(const uint64_t *nodes, size_t ranks, uint32_t *ranks_per_node) { return 0; }
int32_t cpattn_plan_create(const cpattn_problem *problem, const cpattn_options *options, cpattn_plan **plan) { return 0; }
int32_t cpattn_plan_create_on(const cpattn_problem *problem, const cpattn_options *options, const char *machine,
                              cpattn_plan **plan) { return 0; }
int32_t cpattn_plan_with_tokens_of(const cpattn_plan *base, const cpattn_problem *problem, const cpattn_options *options,
                                   cpattn_plan **plan) { return 0; }
int32_t cpattn_plan_auto_for(const cpattn_problem *const *problems, const uint64_t *layers, size_t kinds,
                             const cpattn_options *options, cpattn_plan **plans) { return 0; }
int32_t cpattn_plan_distribution(const cpattn_plan *plan, uint64_t *distribution) { return 0; }
int32_t cpattn_plan_destroy(cpattn_plan *plan) { return 0; }
int32_t cpattn_plan_describe(const cpattn_plan *plan, cpattn_plan_info *info) { return 0; }
int32_t cpattn_plan_share(const cpattn_plan *plan, uint32_t rank, cpattn_share *share) { return 0; }
int32_t cpattn_plan_explain(const cpattn_plan *plan, char *text, size_t capacity, size_t *needed) { return 0; }
int32_t cpattn_plan_verify(const cpattn_plan *plan) { return 0; }
int32_t cpattn_plan_workspace(const cpattn_plan *plan, uint32_t rank, int32_t direction, uint64_t *bytes) { return 0; }
int32_t cpattn_plan_tokens(const cpattn_plan *plan, int32_t side, uint32_t rank, int64_t *tokens, size_t capacity) { return 0; }
int32_t cpattn_plan_positions(const cpattn_plan *plan, int32_t side, uint32_t rank, int64_t *positions,
    size_t capacity) { return 0; }
int32_t cpattn_plan_shard(const cpattn_plan *plan, int32_t side, uint32_t rank, const cpattn_tensor *whole,
    const cpattn_tensor *local) { return 0; }
int32_t cpattn_plan_unshard(const cpattn_plan *plan, int32_t side, uint32_t rank, const cpattn_tensor *local,
    const cpattn_tensor *whole) { return 0; }
int32_t cpattn_plan_shift(const cpattn_plan *plan, uint32_t rank, int64_t by, const void *fill,
    const cpattn_tensor *whole, const cpattn_tensor *local) { return 0; }
int32_t cpattn_local_group(uint32_t world, uint64_t deadline_ms, cpattn_transport **transports) { return 0; }
int32_t cpattn_peer_group(uint32_t world, const int32_t *devices, uint64_t deadline_ms, cpattn_transport **transports) { return 0; }
int32_t cpattn_mpi_group(const void *comm, uint64_t deadline_ms, cpattn_transport **transport) { return 0; }
int32_t cpattn_mpi_ranks_per_node(const void *comm, uint32_t *ranks_per_node) { return 0; }
int32_t cpattn_nccl_unique_id(uint8_t *unique_id) { return 0; }
int32_t cpattn_nccl_group(const uint8_t *unique_id, void *comm, int32_t may_abort, uint32_t rank, uint32_t world,
    int32_t device_id, uint64_t deadline_ms, cpattn_transport **transport) { return 0; }
int32_t cpattn_transport_create(const cpattn_transport_table *table, cpattn_transport **transport) { return 0; }
int32_t cpattn_engine_group(const cpattn_engine_table *table, uint64_t deadline_ms, cpattn_transport **transport) { return 0; }
int32_t cpattn_engine_connect(cpattn_transport *transport) { return 0; }
int32_t cpattn_engine_share(cpattn_transport *transport, cpattn_transport **other) { return 0; }
int32_t cpattn_engine_agree(cpattn_transport *transport, uint32_t first, uint32_t end, uint64_t number, uint64_t *all) { return 0; }
int32_t cpattn_engine_exchange(cpattn_transport *transport, uint32_t step, const cpattn_message *sends, size_t send_count,
    const cpattn_message *recvs, size_t recv_count) { return 0; }
int32_t cpattn_engine_poll(cpattn_transport *transport) { return 0; }
int32_t cpattn_engine_abort(cpattn_transport *transport) { return 0; }
int32_t cpattn_ring_check(cpattn_transport *transport, size_t bytes, cpattn_link *links, size_t capacity,
    size_t *count) { return 0; }
int32_t cpattn_transport_destroy(cpattn_transport *transport) { return 0; }
int32_t cpattn_rank_create(cpattn_transport *transport, const cpattn_rank_options *options, cpattn_rank **rank) { return 0; }
int32_t cpattn_rank_destroy(cpattn_rank *rank) { return 0; }
int32_t cpattn_rank_prepare(cpattn_rank *rank, const cpattn_plan *plan, int32_t direction, const cpattn_purpose *purpose) { return 0; }
int32_t cpattn_rank_ring_check(cpattn_rank *rank, size_t bytes, cpattn_link *links, size_t capacity, size_t *count) { return 0; }
int32_t cpattn_rank_lend_workspace(cpattn_rank *rank, void *workspace, size_t bytes) { return 0; }
int32_t cpattn_forward(cpattn_rank *rank, const cpattn_plan *plan, const cpattn_forward_args *args) { return 0; }
int32_t cpattn_backward(cpattn_rank *rank, const cpattn_plan *plan, const cpattn_backward_args *args) { return 0; }
int32_t cpattn_dropout_mask(double probability, uint64_t seed, uint32_t q_begin, uint32_t q_count, uint32_t k_begin,
    uint32_t k_count, uint32_t head, uint8_t *kept) { return 0; }
int32_t cpattn_rank_to_heads(cpattn_rank *rank, const cpattn_plan *plan, int32_t side, const cpattn_tensor *from,
    const cpattn_tensor *to, void *stream) { return 0; }
int32_t cpattn_rank_to_tokens(cpattn_rank *rank, const cpattn_plan *plan, int32_t side, const cpattn_tensor *from,
    const cpattn_tensor *to, void *stream) { return 0; }
int32_t cpattn_plan_all_to_all_workspace(const cpattn_plan *plan, uint32_t rank, int32_t side, uint32_t dim,
    int32_t dtype, uint64_t *bytes) { return 0; }
int32_t cpattn_plan_verify_all_to_all(const cpattn_plan *plan, int32_t side, uint32_t dim, int32_t dtype) { return 0; }
int32_t cpattn_rank_combine(cpattn_rank *rank, const cpattn_plan *plan, int32_t to, const cpattn_combine_args *args) { return 0; }
int32_t cpattn_plan_verify_combine(const cpattn_plan *plan, int32_t to, int32_t partial) { return 0; }
int32_t cpattn_plan_combine_workspace(const cpattn_plan *plan, uint32_t rank, int32_t to, int32_t partial, uint64_t *bytes) { return 0; }
int32_t cpattn_plan_segments(const cpattn_plan *plan, uint32_t rank, cpattn_segment *segments, size_t capacity, size_t *count) { return 0; }
int32_t cpattn_rank_scan(cpattn_rank *rank, const cpattn_plan *plan, const cpattn_scan *scan, const cpattn_tensor *decay,
    const cpattn_tensor *state, const cpattn_tensor *initial_state) { return 0; }
int32_t cpattn_plan_verify_scan(const cpattn_plan *plan, const cpattn_scan *scan) { return 0; }
int32_t cpattn_plan_scan_workspace(const cpattn_plan *plan, uint32_t rank, const cpattn_scan *scan, uint64_t *bytes) { return 0; }
int32_t cpattn_rank_shift(cpattn_rank *rank, const cpattn_plan *plan, int64_t by, const void *fill,
    const cpattn_tensor *rows, const cpattn_tensor *out) { return 0; }
int32_t cpattn_clock(uint64_t *ns) { return 0; }
int32_t cpattn_rank_record(cpattn_rank *rank, uint64_t capacity) { return 0; }
int32_t cpattn_rank_trace(cpattn_rank *rank, cpattn_event *events, size_t capacity, size_t *count) { return 0; }
int32_t cpattn_rank_gather_trace(cpattn_rank *rank) { return 0; }
int32_t cpattn_rank_trace_accuracy(const cpattn_rank *rank, uint64_t *ns) { return 0; }
int32_t cpattn_timeline_svg(const cpattn_event *events, size_t count, char *text, size_t capacity, size_t *needed) { return 0; }
int32_t cpattn_chrome_trace(const cpattn_event *events, size_t count, char *text, size_t capacity, size_t *needed) { return 0; }
int32_t cpattn_rank_poll(const cpattn_rank *rank) { return 0; }
int32_t cpattn_rank_abort(const cpattn_rank *rank) { return 0; }
int32_t cpattn_scratch_create(uint32_t workers, cpattn_scratch **scratch) { return 0; }
int32_t cpattn_scratch_create_cuda(int32_t device_id, cpattn_scratch **scratch) { return 0; }
int32_t cpattn_scratch_destroy(cpattn_scratch *scratch) { return 0; }
int32_t cpattn_scratch_reserve(cpattn_scratch *scratch, int32_t dtype, uint32_t head_dim, uint32_t value_dim) { return 0; }
int32_t cpattn_scratch_set_sm_margin(cpattn_scratch *scratch, uint32_t multiprocessors) { return 0; }
int32_t cpattn_scratch_set_isa(cpattn_scratch *scratch, int32_t isa) { return 0; }
int32_t cpattn_scratch_reserve_metadata(cpattn_scratch *scratch, uint64_t bytes, uint32_t calls) { return 0; }
int32_t cpattn_attend(cpattn_scratch *scratch, const cpattn_attend_args *args) { return 0; }
int32_t cpattn_attend_metadata(cpattn_scratch *scratch, const cpattn_attend_args *args, uint64_t *bytes) { return 0; }
int32_t cpattn_attend_backward(cpattn_scratch *scratch, const cpattn_attend_backward_args *args) { return 0; }
int32_t cpattn_attend_backward_metadata(cpattn_scratch *scratch, const cpattn_attend_backward_args *args,
    uint64_t *bytes) { return 0; }
int32_t cpattn_delta(cpattn_scratch *scratch, const cpattn_tensor *o, const cpattn_tensor *d_o,
    const cpattn_tensor *delta, void *stream) { return 0; }
int32_t cpattn_delta_with_lse(cpattn_scratch *scratch, const cpattn_tensor *o, const cpattn_tensor *d_o,
    const cpattn_tensor *lse, const cpattn_tensor *d_lse, const cpattn_tensor *delta, void *stream) { return 0; }
int32_t cpattn_finish(cpattn_scratch *scratch, const cpattn_tensor *o, const cpattn_tensor *lse,
    const cpattn_tensor *sinks, const cpattn_range *rows, size_t row_count, void *stream) { return 0; }
int32_t cpattn_sink_gradient(cpattn_scratch *scratch, const cpattn_tensor *lse, const cpattn_tensor *delta,
    const cpattn_tensor *sinks, const cpattn_tensor *dsinks, void *stream) { return 0; }
int32_t cpattn_sink_total(const cpattn_tensor *digits, const cpattn_tensor *dsinks) { return 0; }
int32_t cpattn_merge(cpattn_scratch *scratch, const cpattn_tensor *o, const cpattn_tensor *lse,
    const cpattn_tensor *other_o, const cpattn_tensor *other_lse, void *stream) { return 0; }
int32_t cpattn_transform(cpattn_scratch *scratch, const cpattn_tensor *dst, const cpattn_tensor *const *sources,
    size_t source_count, void *stream) { return 0; }
int32_t cpattn_schedule_create(const cpattn_plan *plan, uint32_t rank, int32_t direction, cpattn_schedule **schedule) { return 0; }
int32_t cpattn_schedule_create_all_to_all(const cpattn_plan *plan, uint32_t rank, int32_t direction, int32_t side, uint32_t dim,
    int32_t dtype, cpattn_schedule **schedule) { return 0; }
int32_t cpattn_schedule_create_combine(const cpattn_plan *plan, uint32_t rank, int32_t to, int32_t partial,
    cpattn_schedule **schedule) { return 0; }
int32_t cpattn_schedule_create_scan(const cpattn_plan *plan, uint32_t rank, const cpattn_scan *scan, cpattn_schedule **schedule) { return 0; }
int32_t cpattn_schedule_destroy(cpattn_schedule *schedule) { return 0; }
int32_t cpattn_schedule_describe(const cpattn_schedule *schedule, cpattn_schedule_info *info) { return 0; }
int32_t cpattn_schedule_op(const cpattn_schedule *schedule, size_t index, cpattn_op *op) { return 0; }
cpattn_dl_device *keep_cpattn_dl_device(void) { return 0; }
cpattn_dl_dtype *keep_cpattn_dl_dtype(void) { return 0; }
cpattn_tensor *keep_cpattn_tensor(void) { return 0; }
cpattn_slice *keep_cpattn_slice(void) { return 0; }
cpattn_problem *keep_cpattn_problem(void) { return 0; }
cpattn_options *keep_cpattn_options(void) { return 0; }
cpattn_plan_info *keep_cpattn_plan_info(void) { return 0; }
cpattn_share *keep_cpattn_share(void) { return 0; }
cpattn_message *keep_cpattn_message(void) { return 0; }
cpattn_transport_table *keep_cpattn_transport_table(void) { return 0; }
cpattn_engine_table *keep_cpattn_engine_table(void) { return 0; }
cpattn_link *keep_cpattn_link(void) { return 0; }
cpattn_kernel_call *keep_cpattn_kernel_call(void) { return 0; }
cpattn_kernel_table *keep_cpattn_kernel_table(void) { return 0; }
cpattn_rank_options *keep_cpattn_rank_options(void) { return 0; }
cpattn_purpose *keep_cpattn_purpose(void) { return 0; }
cpattn_keys *keep_cpattn_keys(void) { return 0; }
cpattn_forward_args *keep_cpattn_forward_args(void) { return 0; }
cpattn_backward_args *keep_cpattn_backward_args(void) { return 0; }
cpattn_combine_args *keep_cpattn_combine_args(void) { return 0; }
cpattn_scan *keep_cpattn_scan(void) { return 0; }
cpattn_segment *keep_cpattn_segment(void) { return 0; }
cpattn_event *keep_cpattn_event(void) { return 0; }
cpattn_range *keep_cpattn_range(void) { return 0; }
cpattn_band *keep_cpattn_band(void) { return 0; }
cpattn_pair *keep_cpattn_pair(void) { return 0; }
cpattn_q_range *keep_cpattn_q_range(void) { return 0; }
cpattn_ranges *keep_cpattn_ranges(void) { return 0; }
cpattn_head_map *keep_cpattn_head_map(void) { return 0; }
cpattn_score *keep_cpattn_score(void) { return 0; }
cpattn_attend_args *keep_cpattn_attend_args(void) { return 0; }
cpattn_attend_backward_args *keep_cpattn_attend_backward_args(void) { return 0; }
cpattn_buffer *keep_cpattn_buffer(void) { return 0; }
cpattn_schedule_info *keep_cpattn_schedule_info(void) { return 0; }
cpattn_view *keep_cpattn_view(void) { return 0; }
cpattn_op_message *keep_cpattn_op_message(void) { return 0; }
cpattn_sum *keep_cpattn_sum(void) { return 0; }
cpattn_op *keep_cpattn_op(void) { return 0; }
