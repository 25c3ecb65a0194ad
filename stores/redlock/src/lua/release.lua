-- Releases the lock, if the attempt holds it and by no later round. KEYS: L, V; ARGV: attempt, round (0: any), channel; the newest round
-- that may have been sent before, and for how long in ms a request of it may still arrive (0: none can).
local attempt, round, latest, arrives = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[4]), tonumber(ARGV[5])
local v, mine = nil, value_of(KEYS[1]) == attempt
if mine then v = vote(KEYS[2], attempt) end
if arrives > 0 and tonumber(redis.call('GET', TOMBSTONE .. attempt) or '-1') < latest then
  redis.call('SET', TOMBSTONE .. attempt, ARGV[4], 'PX', arrives)
end
if not mine or v and round > 0 and v.round > round then return 0 end
redis.call('DEL', KEYS[1], KEYS[2])
-- A lock without a fence was never granted, so no waiter is notified.
if v and v.fence > 0 then publish(ARGV[3], v.fence) end
return 1
