// Scenarios of the Go client: `interop NAMESRV SCENARIO SUFFIX`, the broker's address in BROKER. Each
// uses topics and groups that end with SUFFIX, ends with 0 if all went as it should, and else says on stderr what did not.
package main

import (
	"context"
	"fmt"
	"os"
	"sort"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	rocketmq "github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/admin"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
	"github.com/apache/rocketmq-client-go/v2/rlog"
)

const patience = 60 * time.Second

var namesrv, suffix string

var scenarios = map[string]func(){
	"send":         send,
	"batch":        batch,
	"tags":         tags,
	"sql":          sql,
	"orderly":      orderly,
	"broadcast":    broadcast,
	"retry":        retry,
	"delay":        delay,
	"transactions": transactions,
	"pull":         pull,
	"request":      request,
	"admin":        manage,
	"trace":        trace,
}

func main() {
	rlog.SetLogLevel("warn")
	namesrv, suffix = os.Args[1], os.Args[3]
	scenario, ok := scenarios[os.Args[2]]
	if !ok {
		fail("no scenario %q", os.Args[2])
	}
	scenario()
}

func fail(text string, values ...any) {
	fmt.Fprintf(os.Stderr, text+"\n", values...)
	os.Exit(1)
}

func check(err error) {
	if err != nil {
		fail("%v", err)
	}
}

func name(text string) string { return "go-" + text + "-" + suffix }

func servers() primitive.NsResolver {
	return primitive.NewPassthroughResolver([]string{namesrv})
}

func makeTopic(topic string, queues int) {
	manager, err := admin.NewAdmin(admin.WithResolver(servers()))
	check(err)
	defer manager.Close()
	check(manager.CreateTopic(context.Background(), admin.WithTopicCreate(topic),
		admin.WithBrokerAddrCreate(os.Getenv("BROKER")), admin.WithReadQueueNums(queues), admin.WithWriteQueueNums(queues)))
}

func newProducer(options ...producer.Option) rocketmq.Producer {
	options = append([]producer.Option{producer.WithNsResolver(servers()),
		producer.WithGroupName(name("producers")), producer.WithRetry(2)}, options...)
	made, err := rocketmq.NewProducer(options...)
	check(err)
	check(made.Start())
	return made
}

func message(topic string, number int) *primitive.Message {
	made := primitive.NewMessage(topic, []byte(fmt.Sprintf("%d", number)))
	made.WithTag([]string{"even", "odd"}[number%2])
	made.WithKeys([]string{fmt.Sprintf("key-%d", number)})
	made.WithProperty("number", fmt.Sprintf("%d", number))
	return made
}

func sendAll(producer rocketmq.Producer, topic string, count int) {
	for number := 0; number < count; number++ {
		result, err := producer.SendSync(context.Background(), message(topic, number))
		check(err)
		if result.Status != primitive.SendOK {
			fail("send status %v", result.Status)
		}
	}
}

// What consumers have handed over, by body.
type seen struct {
	lock   sync.Mutex
	counts map[string]int
	order  []string
}

func newSeen() *seen { return &seen{counts: map[string]int{}} }

func (s *seen) add(messages ...*primitive.MessageExt) {
	s.lock.Lock()
	defer s.lock.Unlock()
	for _, one := range messages {
		s.counts[string(one.Body)]++
		s.order = append(s.order, string(one.Body))
	}
}

func (s *seen) size() int {
	s.lock.Lock()
	defer s.lock.Unlock()
	return len(s.counts)
}

func until(what string, claim func() bool) {
	deadline := time.Now().Add(patience)
	for !claim() {
		if time.Now().After(deadline) {
			fail("not in time: %s", what)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func (s *seen) exactly(count int, wanted func(number int) bool) {
	until(fmt.Sprintf("%d messages", count), func() bool { return s.size() >= count })
	time.Sleep(500 * time.Millisecond) // what must not come would be here by now
	s.lock.Lock()
	defer s.lock.Unlock()
	if len(s.counts) != count {
		fail("%d different messages, wanted %d: %v", len(s.counts), count, s.counts)
	}
	for body, times := range s.counts {
		number := 0
		fmt.Sscan(body, &number)
		if times != 1 || !wanted(number) {
			fail("message %s came %d times", body, times)
		}
	}
}

func newConsumer(group string, options ...consumer.Option) rocketmq.PushConsumer {
	options = append([]consumer.Option{consumer.WithNsResolver(servers()),
		consumer.WithGroupName(group), consumer.WithConsumeFromWhere(consumer.ConsumeFromFirstOffset),
		consumer.WithInstance(fmt.Sprintf("%s-%d", group, time.Now().UnixNano()))}, options...)
	made, err := rocketmq.NewPushConsumer(options...)
	check(err)
	return made
}

func listen(made rocketmq.PushConsumer, topic string, selector consumer.MessageSelector, into *seen) {
	check(made.Subscribe(topic, selector, func(_ context.Context, all ...*primitive.MessageExt) (consumer.ConsumeResult, error) {
		into.add(all...)
		return consumer.ConsumeSuccess, nil
	}))
	check(made.Start())
}

func everyOne(int) bool { return true }

func send() {
	topic := name("send")
	makeTopic(topic, 4)
	sender := newProducer()
	defer sender.Shutdown()
	sendAll(sender, topic, 100)
	var ended sync.WaitGroup
	var failed atomic.Int32
	for number := 100; number < 300; number++ {
		ended.Add(1)
		check(sender.SendAsync(context.Background(), func(_ context.Context, result *primitive.SendResult, err error) {
			if err != nil || result.Status != primitive.SendOK {
				failed.Add(1)
			}
			ended.Done()
		}, message(topic, number)))
	}
	ended.Wait()
	if failed.Load() > 0 {
		fail("%d of 200 async sends failed", failed.Load())
	}
	for number := 300; number < 320; number++ {
		check(sender.SendOneWay(context.Background(), message(topic, number)))
	}
	large := primitive.NewMessage(topic, []byte("320"+strings.Repeat(" ", 100_000))) // compressed on the way
	_, err := sender.SendSync(context.Background(), large)
	check(err)
	into := newSeen()
	receiver := newConsumer(name("send-group"))
	listen(receiver, topic, consumer.MessageSelector{}, into)
	defer receiver.Shutdown()
	into.exactly(321, everyOne)
}

func batch() {
	topic := name("batch")
	makeTopic(topic, 2)
	sender := newProducer()
	defer sender.Shutdown()
	var all []*primitive.Message
	for number := 0; number < 50; number++ {
		all = append(all, message(topic, number))
	}
	result, err := sender.SendSync(context.Background(), all...)
	check(err)
	if result.Status != primitive.SendOK {
		fail("send status %v", result.Status)
	}
	into := newSeen()
	receiver := newConsumer(name("batch-group"), consumer.WithConsumeMessageBatchMaxSize(16))
	listen(receiver, topic, consumer.MessageSelector{}, into)
	defer receiver.Shutdown()
	into.exactly(50, everyOne)
}

func filtered(topic string, selector consumer.MessageSelector, count int, wanted func(int) bool) {
	makeTopic(topic, 4)
	sender := newProducer()
	defer sender.Shutdown()
	sendAll(sender, topic, 60)
	into := newSeen()
	receiver := newConsumer(topic + "-group")
	listen(receiver, topic, selector, into)
	defer receiver.Shutdown()
	into.exactly(count, wanted)
}

func tags() {
	filtered(name("tags"), consumer.MessageSelector{Type: consumer.TAG, Expression: "odd || none"}, 30,
		func(number int) bool { return number%2 == 1 })
}

func sql() {
	filtered(name("sql"), consumer.MessageSelector{Type: consumer.SQL92, Expression: "number BETWEEN 10 AND 19 AND TAGS = 'odd'"}, 5,
		func(number int) bool { return number >= 10 && number < 20 && number%2 == 1 })
}

func orderly() {
	topic := name("orderly")
	makeTopic(topic, 4)
	sender := newProducer(producer.WithQueueSelector(producer.NewHashQueueSelector()))
	defer sender.Shutdown()
	for number := 0; number < 200; number++ {
		one := message(topic, number)
		one.WithShardingKey(fmt.Sprintf("shard-%d", number%8))
		_, err := sender.SendSync(context.Background(), one)
		check(err)
	}
	into := newSeen()
	var refused atomic.Bool
	receiver := newConsumer(name("orderly-group"), consumer.WithConsumerOrder(true))
	check(receiver.Subscribe(topic, consumer.MessageSelector{}, func(_ context.Context, all ...*primitive.MessageExt) (consumer.ConsumeResult, error) {
		for _, one := range all {
			if string(one.Body) == "77" && !refused.Swap(true) {
				return consumer.SuspendCurrentQueueAMoment, nil
			}
		}
		into.add(all...)
		return consumer.ConsumeSuccess, nil
	}))
	check(receiver.Start())
	defer receiver.Shutdown()
	until("200 in order", func() bool { return into.size() == 200 })
	last := map[int]int{}
	into.lock.Lock()
	defer into.lock.Unlock()
	for _, body := range into.order {
		number := 0
		fmt.Sscan(body, &number)
		if before, ok := last[number%8]; ok && before > number {
			fail("shard %d: %d after %d", number%8, number, before)
		}
		last[number%8] = number
	}
}

func broadcast() {
	topic := name("broadcast")
	makeTopic(topic, 2)
	all := []*seen{newSeen(), newSeen()}
	for _, into := range all {
		receiver := newConsumer(name("broadcast-group"), consumer.WithConsumerModel(consumer.BroadCasting))
		listen(receiver, topic, consumer.MessageSelector{}, into)
		defer receiver.Shutdown()
	}
	sender := newProducer()
	defer sender.Shutdown()
	sendAll(sender, topic, 20)
	for _, into := range all {
		into.exactly(20, everyOne)
	}
}

func retry() {
	topic := name("retry")
	makeTopic(topic, 1)
	sender := newProducer()
	defer sender.Shutdown()
	sendAll(sender, topic, 3)
	var again atomic.Int32
	receiver := newConsumer(name("retry-group"))
	check(receiver.Subscribe(topic, consumer.MessageSelector{}, func(context_ context.Context, all ...*primitive.MessageExt) (consumer.ConsumeResult, error) {
		for _, one := range all {
			if string(one.Body) != "1" {
				continue
			}
			if one.ReconsumeTimes == 0 {
				if concurrently, ok := primitive.GetConcurrentlyCtx(context_); ok {
					concurrently.DelayLevelWhenNextConsume = 1
				}
				return consumer.ConsumeRetryLater, nil
			}
			again.Store(one.ReconsumeTimes)
		}
		return consumer.ConsumeSuccess, nil
	}))
	check(receiver.Start())
	defer receiver.Shutdown()
	until("a retry", func() bool { return again.Load() == 1 })
}

func delay() {
	topic := name("delay")
	makeTopic(topic, 2)
	sender := newProducer()
	defer sender.Shutdown()
	var arrived atomic.Int64
	receiver := newConsumer(name("delay-group"))
	check(receiver.Subscribe(topic, consumer.MessageSelector{}, func(_ context.Context, all ...*primitive.MessageExt) (consumer.ConsumeResult, error) {
		arrived.Store(time.Now().UnixMilli())
		return consumer.ConsumeSuccess, nil
	}))
	check(receiver.Start())
	defer receiver.Shutdown()
	one := message(topic, 1)
	one.WithDelayTimeLevel(2)
	began := time.Now().UnixMilli()
	_, err := sender.SendSync(context.Background(), one)
	check(err)
	until("a delayed message", func() bool { return arrived.Load() > 0 })
	if took := arrived.Load() - began; took < 4900 {
		fail("level 2 is 5 s, it came after %d ms", took)
	}
}

type listener struct{ checked atomic.Int32 }

func (l *listener) ExecuteLocalTransaction(one *primitive.Message) primitive.LocalTransactionState {
	switch string(one.Body) {
	case "0":
		return primitive.CommitMessageState
	case "1":
		return primitive.RollbackMessageState
	}
	return primitive.UnknowState
}

func (l *listener) CheckLocalTransaction(one *primitive.MessageExt) primitive.LocalTransactionState {
	l.checked.Add(1)
	if string(one.Body) == "2" {
		return primitive.CommitMessageState
	}
	return primitive.RollbackMessageState
}

func transactions() {
	topic := name("transactions")
	makeTopic(topic, 2)
	asked := &listener{}
	sender, err := rocketmq.NewTransactionProducer(asked, producer.WithNsResolver(servers()),
		producer.WithGroupName(name("transaction-producers")), producer.WithRetry(1))
	check(err)
	check(sender.Start())
	defer sender.Shutdown()
	into := newSeen()
	receiver := newConsumer(name("transactions-group"))
	listen(receiver, topic, consumer.MessageSelector{}, into)
	defer receiver.Shutdown()
	for number := 0; number < 4; number++ {
		_, err := sender.SendMessageInTransaction(context.Background(), message(topic, number))
		check(err)
	}
	until("two checks", func() bool { return asked.checked.Load() >= 2 })
	into.exactly(2, func(number int) bool { return number == 0 || number == 2 })
}

func pull() {
	topic := name("pull")
	makeTopic(topic, 2)
	sender := newProducer()
	defer sender.Shutdown()
	sendAll(sender, topic, 40)
	receiver, err := rocketmq.NewPullConsumer(consumer.WithNsResolver(servers()),
		consumer.WithGroupName(name("pull-group")), consumer.WithConsumeFromWhere(consumer.ConsumeFromFirstOffset))
	check(err)
	check(receiver.Subscribe(topic, consumer.MessageSelector{}))
	check(receiver.Start())
	into := newSeen()
	until("40 polled", func() bool {
		polled, err := receiver.Poll(context.Background(), time.Second)
		if consumer.IsNoNewMsgError(err) {
			return false
		}
		check(err)
		into.add(polled.GetMsgList()...)
		receiver.ACK(context.Background(), polled, consumer.ConsumeSuccess)
		return into.size() >= 40
	})
	check(receiver.PersistOffset(context.Background(), topic))
	check(receiver.Shutdown())
	into.exactly(40, everyOne)
}

func request() {
	topic := name("request")
	makeTopic(topic, 1)
	makeTopic(name("hello"), 1)
	replier := newProducer(producer.WithGroupName(name("repliers")), producer.WithInstanceName("replier"))
	defer replier.Shutdown()
	receiver := newConsumer(name("request-group"))
	replied := make(chan struct{}, 16)
	check(receiver.Subscribe(topic, consumer.MessageSelector{}, func(_ context.Context, all ...*primitive.MessageExt) (consumer.ConsumeResult, error) {
		for _, one := range all {
			reply, err := consumer.CreateReplyMessage(one, []byte("re: "+string(one.Body)))
			check(err)
			_, err = replier.SendSync(context.Background(), reply)
			check(err)
			replied <- struct{}{}
		}
		return consumer.ConsumeSuccess, nil
	}))
	check(receiver.Start())
	defer receiver.Shutdown()
	asker := newProducer(producer.WithInstanceName("asker"))
	defer asker.Shutdown()
	// This client says hello to the brokers that it knows a second after its start, and to others
	// half a minute later. Before that nobody can push a reply to it.
	_, err := asker.SendSync(context.Background(), message(name("hello"), 0))
	check(err)
	time.Sleep(3 * time.Second)
	began := time.Now()
	_, err = asker.Request(context.Background(), 30*time.Second, message(topic, 7))
	check(err)
	// That it came in time is all this client's release shows: its replies
	// travel without their body.
	if took := time.Since(began); took > 25*time.Second {
		fail("a reply after %v", took)
	}
	<-replied // the reply is there before its sender is told so; nobody may shut down in between
}

func manage() {
	topic := name("managed")
	makeTopic(topic, 3)
	manager, err := admin.NewAdmin(admin.WithResolver(servers()))
	check(err)
	defer manager.Close()
	list, err := manager.FetchAllTopicList(context.Background())
	check(err)
	sort.Strings(list.TopicList)
	if at := sort.SearchStrings(list.TopicList, topic); at == len(list.TopicList) || list.TopicList[at] != topic {
		fail("%s is not among %v", topic, list.TopicList)
	}
	queues, err := manager.FetchPublishMessageQueues(context.Background(), topic)
	check(err)
	if len(queues) != 3 {
		fail("%d queues", len(queues))
	}
	groups, err := manager.GetAllSubscriptionGroup(context.Background(), os.Getenv("BROKER"), 3*time.Second)
	check(err)
	if len(groups.SubscriptionGroupTable) == 0 {
		fail("no subscription group at all")
	}
	check(manager.DeleteTopic(context.Background(), admin.WithTopicDelete(topic),
		admin.WithBrokerAddrDelete(os.Getenv("BROKER")), admin.WithNameSrvAddr([]string{namesrv})))
	list, err = manager.FetchAllTopicList(context.Background())
	check(err)
	for _, one := range list.TopicList {
		if one == topic {
			fail("%s is still there", topic)
		}
	}
}

func trace() {
	topic := name("traced")
	makeTopic(topic, 1)
	config := &primitive.TraceConfig{Access: primitive.Local, Resolver: servers(), GroupName: name("tracers")}
	sender := newProducer(producer.WithTrace(config))
	into := newSeen()
	receiver := newConsumer(name("traced-group"), consumer.WithTrace(config))
	listen(receiver, topic, consumer.MessageSelector{}, into)
	sendAll(sender, topic, 5)
	into.exactly(5, everyOne)
	time.Sleep(2 * time.Second) // traces are written in batches
	check(sender.Shutdown())
	check(receiver.Shutdown())
	found := newSeen()
	reader := newConsumer(name("trace-readers"))
	check(reader.Subscribe("RMQ_SYS_TRACE_TOPIC", consumer.MessageSelector{}, func(_ context.Context, all ...*primitive.MessageExt) (consumer.ConsumeResult, error) {
		for _, one := range all {
			if strings.Contains(string(one.Body), topic) {
				found.add(one)
			}
		}
		return consumer.ConsumeSuccess, nil
	}))
	check(reader.Start())
	defer reader.Shutdown()
	until("traces", func() bool { return found.size() > 0 })
}
