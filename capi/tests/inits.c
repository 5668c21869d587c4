/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Every INIT macro names every member: -Wextra warns of missing ones, every compiler refuses surplus ones. */
#include "cpattn.h"

cpattn_problem problem = CPATTN_PROBLEM_INIT;
cpattn_options options = CPATTN_OPTIONS_INIT;
cpattn_plan_info info = CPATTN_PLAN_INFO_INIT;
cpattn_group_limits group_limits = CPATTN_GROUP_LIMITS_INIT;
cpattn_groups_info groups_info = CPATTN_GROUPS_INFO_INIT;
cpattn_share share = CPATTN_SHARE_INIT;
cpattn_transport_table table = CPATTN_TRANSPORT_TABLE_INIT;
cpattn_engine_table engine = CPATTN_ENGINE_TABLE_INIT;
cpattn_kernel_call call = CPATTN_KERNEL_CALL_INIT;
cpattn_kernel_table kernel = CPATTN_KERNEL_TABLE_INIT;
cpattn_rank_options rank_options = CPATTN_RANK_OPTIONS_INIT;
cpattn_combine_args combine_args = CPATTN_COMBINE_ARGS_INIT;
cpattn_scan scan = CPATTN_SCAN_INIT;
cpattn_keys keys = CPATTN_KEYS_INIT;
cpattn_purpose purpose = CPATTN_PURPOSE_INIT;
cpattn_forward_args forward_args = CPATTN_FORWARD_ARGS_INIT;
cpattn_backward_args backward_args = CPATTN_BACKWARD_ARGS_INIT;
cpattn_attend_args attend_args = CPATTN_ATTEND_ARGS_INIT;
cpattn_attend_backward_args attend_backward_args = CPATTN_ATTEND_BACKWARD_ARGS_INIT;
cpattn_schedule_info schedule_info = CPATTN_SCHEDULE_INFO_INIT;
cpattn_op op = CPATTN_OP_INIT;
