-- Answers many lock requests of one kind, each for a lock or for several of one hash slot. KEYS: counter, watched, waited, then
-- L of each name of each request. ARGV: the highest fence seen, the client, the base, the claim; what the requests have in
-- common: how long their keys are to live (ttl and delay), their head ('P' if the hold will be a plain one, 0 if they do not
-- wait, 1 if they do, 2 if they waited and were notified, how many names each has, the minimum hold, the fence to raise to,
-- the generation, how long a queue entry is to last), and their terms (see HOLD) from the owner on; and then the attempt of each, with terms of its own behind
-- it if it has others.
local COUNTER, WATCHED, WAITED, FORCED = KEYS[1], KEYS[2], KEYS[3], false
local floor, BASE, client = tonumber(ARGV[1]), ARGV[3], ARGV[2]
local answers, rest, RELEASED, UNREADABLE, OTHER_FORMAT = {}, {}, 17, 19, 20

-- First those that find their one lock free, and no queue before it: the plain pattern, and the fence with it.
local known = redis.call('MGET', COUNTER, WATCHED, WAITED, BASE .. 'released')
local last, waited, tombstones = tonumber(known[1] or '0'), known[3], known[4]
local time = redis.call('TIME')
local us = time[1] * 1000000 + time[2]
local px, head, common, at = ARGV[5], ARGV[6], ARGV[7], 4
local mark, stage, count = string.byte(head, 1, 3)
local ends = math.floor(us / 1000) + px
local fence, granted, first = math.max(last, us - 1, floor), false, struct.pack('>ddd', ends, us, 0)
-- While a client watches, holds are stored so that their end can be told.
local simple = count == 1 and mark == 80 and not known[2]
for i = 1, #ARGV - 7 do
  local attempt, terms, answer = ARGV[i + 7], common, nil
  if #attempt > 32 then attempt, terms = string.sub(attempt, 1, 32), string.sub(attempt, 33) end
  -- The attempt was released, and this request is from before: no caller waits for it.
  local released = tombstones and tonumber(redis.call('GET', BASE .. 'released:' .. attempt) or '-1')
  if released and string.byte(head, 16) <= released then
    answer = { RELEASED }
  elseif simple and stage == 2 then
    -- A waiter was told that it has been let in, and confirms: from here on it has the whole of its ttl.
    -- A fence that is not above all that the client has seen is raised below.
    local value = redis.pcall('GET', KEYS[at])
    if type(value) == 'string' and string.sub(value, 1, 33) == attempt .. '\1' and struct.unpack('>d', value, 34) > floor then
      redis.call('SET', KEYS[at], attempt .. '\0' .. string.sub(value, 34, 41) .. struct.pack('>d', ends)
        .. string.sub(value, 50), 'PX', px)
      redis.call('SREM', BASE .. 'unconfirmed:' .. client, attempt)
      answer = struct.unpack('>d', value, 34)
    end
  elseif simple and not (waited and redis.call('EXISTS', BASE .. 'queue:' .. KEYS[at]) == 1) then
    -- A server that is full refuses this, and who holds the lock, if it is taken, is found out below.
    local value = attempt .. '\0' .. struct.pack('>d', fence + 1) .. first .. terms
    local set = redis.pcall('SET', KEYS[at], value, 'NX', 'PX', px)
    if set and set.ok then
      fence, granted = fence + 1, true
      answer = fence
    end
  end
  answers[i] = answer or 0
  if not answer then rest[#rest + 1] = { i, at } end
  at = at + count
end
if granted then redis.call('SET', COUNTER, fence) end
if #rest == 0 then return answers end

local CLAIM = tonumber(ARGV[4])
local CLIENT = BASE .. 'client:' .. client
